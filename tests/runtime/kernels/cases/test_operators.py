"""Operators that call kernels, on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hecate.runtime.comm.world import SINGLE
from hecate.runtime.ops import grouped_mm
from hecate.runtime.placement.owners import Owners
from tests.runtime.kernels.device import DEVICE, INTERPRETED, MARKS, whole_numbers
from tests.support import reference
from tests.support.layers import add_layer

pytestmark = MARKS


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Sequence[torch.dtype]:
    """What torch's own kernel multiplies where there is one operand; here its implementation for CPUs."""
    if INTERPRETED:
        monkeypatch.setattr(grouped_mm, "_has_kernel", lambda _: True)
    return [torch.bfloat16] if grouped_mm._has_kernel(torch.empty(0, device=DEVICE)) else []


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 5), (torch.float16, 5), (torch.bfloat16, 8)])
def test_grouped_mm_pair_and_its_gradients(
    dtype: torch.dtype, n: int, transposed: bool, launches: list[str], torchs: Sequence[torch.dtype]
) -> None:
    """With a slot without rows, and rows behind the last."""
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device=DEVICE)
    x = whole_numbers(9, 16, most=2, dtype=dtype).requires_grad_()
    shape = (n, 16) if transposed else (16, n)
    own, more = (whole_numbers(count, *shape, most=2, seed=count, dtype=dtype).requires_grad_() for count in (2, 1))
    used = [w.transpose(1, 2) if transposed else w for w in (own, more)]
    out = torch.ops.hecate.grouped_mm_pair(x, *used, offs)
    expected = reference.grouped_mm_pair(x, *used, offs)
    assert torch.equal(out, expected)
    grad = whole_numbers(9, n, most=2, dtype=dtype)
    ours, theirs = (torch.autograd.grad(one, (x, own, more), grad) for one in (out, expected))
    for a, b, like in zip(ours, theirs, (x, own, more), strict=True):
        assert torch.equal(a, b) and a.stride() == like.stride()
    assert launches == ["grouped_mm", "grouped_mm", *(cleared_slots() if dtype in torchs else ["weight_grads"])]


def cleared_slots() -> list[str]:
    """What is launched behind weight gradients of torch's."""
    return [] if grouped_mm.writes_empty_slots(DEVICE) else ["clear_rows"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 5), (torch.bfloat16, 8)])
def test_a_single_operand(
    dtype: torch.dtype, n: int, transposed: bool, launches: list[str], torchs: Sequence[torch.dtype]
) -> None:
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device=DEVICE)
    x = whole_numbers(9, 16, most=2, dtype=dtype).requires_grad_()
    w = whole_numbers(3, *((n, 16) if transposed else (16, n)), most=2, dtype=dtype).requires_grad_()
    used = w.transpose(1, 2) if transposed else w
    out, expected = torch.ops.hecate.grouped_mm(x, used, offs), reference.grouped_mm(x, used, offs)
    assert torch.equal(out, expected)
    grad = whole_numbers(9, n, most=2, dtype=dtype)
    for a, b in zip(*(torch.autograd.grad(one, (x, w), grad) for one in (out, expected)), strict=True):
        assert torch.equal(a, b)
    by_torch = ["clear_rows"] * 2 + cleared_slots()
    assert launches == (by_torch if dtype in torchs else ["grouped_mm", "grouped_mm", "weight_grads"])


def test_nothing_is_cleared_where_all_rows_are_of_slots(launches: list[str], torchs: Sequence[torch.dtype]) -> None:
    """Also in the gradient of the rows; and there may be no rows at all."""
    w = whole_numbers(3, 16, 8, most=2, dtype=torch.bfloat16)
    for ends in ([2, 2, 7], [0, 0, 0]):
        offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        x = whole_numbers(ends[-1], 16, most=2, dtype=torch.bfloat16).requires_grad_()
        out, expected = torch.ops.hecate.grouped_mm(x, w, offs, True), reference.grouped_mm(x, w, offs)
        assert torch.equal(out, expected)
        grad = whole_numbers(ends[-1], 8, most=2, dtype=torch.bfloat16)
        (found,) = torch.autograd.grad(out, x, grad)
        assert torch.equal(found, reference.grouped_mm(grad, w.transpose(1, 2), offs))
    assert torch.bfloat16 not in torchs or not launches


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_exchange_and_back(wire: torch.dtype | None, launches: list[str]) -> None:
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE)
    layer.wire_dtype = wire
    rows = whole_numbers(8, 20).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    send_index, receive_index = (torch.randperm(6, generator=generator).to(DEVICE) for _ in range(2))
    ticket = torch.tensor([[6], [6]]), send_index, receive_index
    out = torch.ops.hecate.exchange(rows, *ticket, layer.id)
    assert torch.equal(out, rows[send_index][receive_index])
    back = torch.ops.hecate.exchange_back(out * 2, *ticket, 8, layer.id)
    assert torch.equal(back[:6], rows[:6] * 2) and not back[6:].any()
    (grad,) = torch.autograd.grad(back.sum(), rows)
    assert grad[:6].eq(2).all() and not grad[6:].any()
    assert launches == ["gather_rows"] * 2 + ["scatter_rows"] * 2 + ["gather_rows"] * 2 + ["scatter_rows"] * 2
