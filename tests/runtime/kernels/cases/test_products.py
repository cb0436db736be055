"""Grouped products, against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hecate.runtime.kernels import grouped_mm as products
from hecate.runtime.kernels.clear_rows import clear_empty_slots, clear_rows_behind
from hecate.runtime.kernels.grouped_mm import grouped_mm, grouped_mm_reference
from hecate.runtime.kernels.weight_grads import weight_grads, weight_grads_reference
from tests.runtime.kernels.device import DEVICE, DTYPES, MARKS, whole_numbers

pytestmark = MARKS
# Rows of slots: none, less than a tile, more than one, none, and a few rows behind the last.
OFFS = [0, 5, 75, 75, 140]
ROWS = 147
PAIRS = [(5, 0), (0, 5), (2, 3), (4, 1)]


def offsets(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype, device=DEVICE)


def weights(slots: int, k: int, n: int, dtype: torch.dtype, transposed: bool, seed: int = 0) -> torch.Tensor:
    shape = (slots, n, k) if transposed else (slots, k, n)
    w = whole_numbers(*shape, most=1, seed=seed, dtype=dtype)
    return w.transpose(1, 2) if transposed else w


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("owned", "replicas"), PAIRS)
def test_grouped_mm(owned: int, replicas: int, dtype: torch.dtype, transposed: bool, launches: list[str]) -> None:
    x = whole_numbers(ROWS, 40, most=2, dtype=dtype)
    own = weights(owned, 40, 70, dtype, transposed, seed=1)
    more = weights(replicas, 40, 70, dtype, transposed, seed=2)
    out = grouped_mm(x, own, more, offsets(*OFFS))
    assert out.dtype == dtype and torch.equal(out, grouped_mm_reference(x, [own, more], offsets(*OFFS)))
    assert out.any() and not out[OFFS[-1] :].any(), "rows beyond the last offset are zero"
    assert launches == ["grouped_mm"]


def test_operands_in_any_layout() -> None:
    x, offs = whole_numbers(20, 80, most=2)[:, ::2], offsets(3, 11, 20, dtype=torch.int64)
    own, more = weights(2, 40, 6, torch.float32, False), weights(1, 40, 6, torch.float32, True)
    expected = grouped_mm_reference(x, [own, more], offs)
    assert torch.equal(grouped_mm(x, own, more, offs), expected)
    spread = torch.stack([own, own], dim=3)[..., 0]
    assert torch.equal(grouped_mm(x, spread, more.contiguous(), offs), expected)


def test_more_slots_than_a_program_reads_at_once(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the first ones, around a border, in the last, and behind it."""
    some = 8
    monkeypatch.setattr(products, "SLOTS", some)
    sizes = torch.zeros(2 * some + 5, dtype=torch.int64)
    sizes[[1, some - 1, some, 2 * some, -1]] = torch.tensor([3, 70, 1, 65, 2])
    offs = sizes.cumsum(0).to(DEVICE, torch.int32)
    x, w = whole_numbers(145, 4, most=2), whole_numbers(len(sizes), 4, 5, most=2, seed=1)
    for owned in (0, some, len(sizes)):
        assert torch.equal(grouped_mm(x, w[:owned], w[owned:], offs), grouped_mm_reference(x, [w], offs))
    assert launches == ["grouped_mm"] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_torch_leaves_is_cleared(dtype: torch.dtype, launches: list[str]) -> None:
    for ends in ([0, 5, 75, 75, 140], [0, 0, 0], [147], [0, 147, 147]):
        rows = whole_numbers(147, 300, dtype=dtype) + 100
        expected = rows.clone()
        expected[ends[-1] :] = 0
        clear_rows_behind(rows, offsets(*ends))
        assert torch.equal(rows, expected)
        matrices = torch.full((len(ends), 70, 65), torch.nan, dtype=dtype, device=DEVICE)
        clear_empty_slots(matrices, offsets(*ends, dtype=torch.int64))
        empty = torch.diff(torch.tensor([0, *ends])) == 0
        assert [not matrix.any() for matrix in matrices] == empty.tolist()
        assert all(bool(matrix.isnan().all()) != none for matrix, none in zip(matrices, empty.tolist(), strict=True))
    assert set(launches) == {"clear_rows"} and len(launches) == 8


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int64])
@pytest.mark.parametrize("lost", [False, True])
def test_rows_that_are_lost_are_no_numbers(dtype: torch.dtype, lost: bool) -> None:
    rows = whole_numbers(40, 300, dtype=dtype) + 100
    expected = rows.clone()
    expected[17:] = 0
    if lost:
        expected.fill_(torch.nan if dtype.is_floating_point else 0)
    clear_rows_behind(rows, offsets(3, 17), torch.tensor(lost, device=DEVICE))
    torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_beyond_the_last_offset_are_zero_whatever_the_matrices_hold() -> None:
    x, own = whole_numbers(9, 4), torch.full((2, 4, 5), torch.nan, device=DEVICE)
    assert not grouped_mm(x, own, own[:0], offsets(0, 0)).any()
    x = torch.full((9, 4), torch.inf, device=DEVICE)
    out = grouped_mm(x, torch.ones_like(own), own[:0], offsets(2, 2))
    assert out[:2].isinf().all() and not out[2:].any()


def test_nothing_to_multiply(launches: list[str]) -> None:
    none = torch.zeros(0, 4, 5, device=DEVICE)
    assert grouped_mm(whole_numbers(0, 4), none, none, offsets()).shape == (0, 5)
    assert grouped_mm(whole_numbers(0, 4), torch.ones(2, 4, 5, device=DEVICE), none, offsets(0, 0)).shape == (0, 5)
    assert not grouped_mm(whole_numbers(3, 4), none, none, offsets()).any()
    empty = torch.zeros(2, 0, 5, device=DEVICE)
    assert grouped_mm(whole_numbers(3, 0), empty, empty[:0], offsets(1, 3)).tolist() == [[0.0] * 5] * 3
    weight_grads(whole_numbers(0, 4), whole_numbers(0, 5), offsets(), none, none)
    assert not launches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("owned", "replicas"), PAIRS)
def test_weight_grads(owned: int, replicas: int, dtype: torch.dtype, launches: list[str]) -> None:
    left, right = whole_numbers(ROWS, 70, most=1, dtype=dtype), whole_numbers(ROWS, 40, most=1, seed=1, dtype=dtype)
    found, expected = (
        [torch.full((slots, 70, 40), torch.nan, device=DEVICE, dtype=dtype) for slots in (owned, replicas)]
        for _ in range(2)
    )
    weight_grads(left, right, offsets(*OFFS), *found)
    weight_grads_reference(left, right, offsets(*OFFS), expected)
    both = torch.cat(found)
    assert torch.equal(both, torch.cat(expected))
    assert both[1].any() and not both[0].any() and not both[3].any(), "zeros for slots without rows"
    assert launches == ["weight_grads"]


def test_a_slots_gradient_does_not_know_the_rows_of_others() -> None:
    left, right = whole_numbers(8, 5), whole_numbers(8, 6)
    for part in (left, right):
        part[3:] = torch.inf
    found = torch.empty(2, 5, 6, device=DEVICE)
    weight_grads(left, right, offsets(3, 5), found, found[:0])
    assert torch.equal(found[0], left[:3].t() @ right[:3]) and not found[1].isfinite().any()


# Sizes about the borders of tiles, of the products and of the gradients.
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 1, 3, 32, 64, 70]), min_size=1, max_size=9),
    st.integers(0, 66),
    st.integers(1, 40),
    st.integers(1, 70),
)
@example([1], 0, 1, 1)
def test_products_with_any_slots(sizes: list[int], padding: int, k: int, n: int) -> None:
    offs = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
    half = len(sizes) // 2
    x, grad = (whole_numbers(sum(sizes) + padding, width, most=2, seed=width) for width in (k, n))
    w = weights(len(sizes), k, n, torch.float32, False)
    own, more = w[:half], w[half:]
    assert torch.equal(grouped_mm(x, own, more, offs), grouped_mm_reference(x, [own, more], offs))
    found, expected = (torch.full((len(sizes), n, k), torch.nan, device=DEVICE) for _ in range(2))
    weight_grads(grad, x, offs, found[:half], found[half:])
    weight_grads_reference(grad, x, offs, [expected])
    assert torch.equal(found, expected)


def test_rows_and_offsets_with_gaps() -> None:
    offs = offsets(4, 9, 4, 9, 25, 9)[::2]
    x, grad = whole_numbers(30, 20)[:, ::2], whole_numbers(30, 24, seed=1)[:, 4:16]
    w = weights(3, 10, 12, torch.float32, False)
    assert torch.equal(grouped_mm(x, w, w[:0], offs), grouped_mm_reference(x, [w], offs))
    found, expected = (torch.empty(3, 12, 10, device=DEVICE) for _ in range(2))
    weight_grads(grad, x, offs, found, found[:0])
    weight_grads_reference(grad, x, offs, [expected])
    assert torch.equal(found, expected)
