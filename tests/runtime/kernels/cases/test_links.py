"""Kernels that write into other ranks' memory: against their references, and the protocol that they make together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hecate.runtime.kernels.clear_rows import clear_rows_behind
from hecate.runtime.kernels.launch import INTERPRETED
from hecate.runtime.one_sided import links
from hecate.runtime.one_sided.links import COUNT_BITS, Chunk, Rows
from hecate.runtime.one_sided.post_words import post_words, post_words_reference
from hecate.runtime.one_sided.put_rows import put_rows, put_rows_reference
from hecate.runtime.one_sided.take_rows import take_rows, take_rows_reference
from hecate.runtime.one_sided.transport import ExchangeFailed, Transport
from hecate.runtime.one_sided.wait_words import wait_words, wait_words_reference
from hecate.runtime.one_sided.windows import local_windows
from tests.runtime.kernels.device import DEVICE, DTYPES, MARKS, index_of, whole_numbers
from tests.runtime.one_sided.protocol import SEGMENT, WIDTH, Case, Exchanges, cases, run, skewed
from tests.support.extent import ALL
from tests.support.one_sided import all_to_all
from tests.support.unordered_memory import Ranks

pytestmark = MARKS
WORLD = 5


def addresses(tensors: list[Tensor]) -> Tensor:
    return index_of(*(tensor.data_ptr() for tensor in tensors))


def copy_of(chunk: Chunk) -> Chunk:
    return Chunk(*(numbers.clone() for numbers in chunk.numbers), chunk.first)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    rows = st.sampled_from([0, 0, 1, 3, 7])
    numbers = (rows, rows, st.integers(0, 5), st.sampled_from([0, 0, 0, 1]))
    drawn = (draw(st.lists(each, min_size=WORLD, max_size=WORLD)) for each in numbers)
    return Chunk(*(index_of(*each) for each in drawn), draw(st.sampled_from([0, 2, 4])))


def rows_of(tensor: Tensor, in_order: bool, index: list[int]) -> Rows:
    return Rows(tensor, index_of(*index) if in_order else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", DTYPES)
@settings(max_examples=4, deadline=None)
@given(chunks(), st.booleans(), st.sampled_from([1, 8, 31]), st.randoms(use_true_random=False))
def test_rows_are_put_and_taken(
    dtype: torch.dtype, wire: torch.dtype, chunk: Chunk, in_order: bool, width: int, random: object
) -> None:
    """There are more rows than travel, and links with more than a chunk has."""
    chunk = replace(chunk, receives=chunk.sends)
    total = int(chunk.sends.sum())
    index = np.random.default_rng(random.randrange(2**32)).permutation(total + 2).tolist()  # type: ignore[attr-defined]
    rows = rows_of(whole_numbers(total + 2, width, dtype=dtype), in_order, index)
    found, expected = (
        [torch.zeros(3, WORLD, SEGMENT, dtype=torch.uint8, device=DEVICE) for _ in range(WORLD)] for _ in range(2)
    )
    put_rows(rows, chunk, found, addresses(found), 2, wire)
    put_rows_reference(rows, chunk, expected, 2, wire)
    assert torch.equal(torch.stack(found), torch.stack(expected))

    window = whole_numbers(3, WORLD, SEGMENT // wire.itemsize, dtype=wire).view(torch.uint8)
    outs = [torch.full((total + 2, width), 99, dtype=dtype, device=DEVICE) for _ in range(2)]
    take_rows(window, rows_of(outs[0], in_order, index), chunk, wire)
    take_rows_reference(window, rows_of(outs[1], in_order, index), chunk, wire)
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_other_rows_move_as_bytes(dtype: torch.dtype, launches: list[str]) -> None:
    counts, none = index_of(1, 3), index_of(0, 0)
    rows, chunk = whole_numbers(4, 6).to(dtype), Chunk(counts, counts, none, none, 0)
    windows = [torch.zeros(1, 2, 256, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    put_rows(Rows(rows), chunk, windows, addresses(windows), 1, dtype)
    out = torch.zeros_like(rows)
    # As if both links led here.
    window = torch.stack([windows[0][0, 1], windows[1][0, 1]]).unsqueeze(0)
    take_rows(window, Rows(out), chunk, dtype)
    assert torch.equal(out, rows) and launches == ["put_rows", "take_rows"]


@settings(max_examples=15, deadline=None)
@given(chunks(), st.integers(1, 3))
def test_words(chunk: Chunk, places: int) -> None:
    found, expected = (
        [torch.zeros(places, WORLD, dtype=torch.int64, device=DEVICE) for _ in range(WORLD)] for _ in range(2)
    )
    copy = copy_of(chunk)
    post_words(chunk, found, addresses(found), 3)
    post_words_reference(copy, expected, 3)
    assert torch.equal(torch.stack(found), torch.stack(expected)) and torch.equal(chunk.told, copy.told)


@settings(max_examples=15, deadline=None)
@given(chunks(), st.integers(1, 3), st.integers(0, 2**16))
def test_waiting(chunk: Chunk, places: int, seed: int) -> None:
    """Words of other numbers than those that are waited for."""
    random = np.random.default_rng(seed)
    words = (random.integers(0, 7, (places, WORLD)) << COUNT_BITS) + random.integers(0, 9, (places, WORLD))
    board = torch.from_numpy(words).to(DEVICE)
    copy = copy_of(chunk)
    wait_words(board, chunk, seconds=0.006)
    wait_words_reference(board, copy, 0.006)
    assert torch.equal(chunk.late, copy.late) and torch.equal(chunk.receives, copy.receives)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_rows_come_there_and_back(world_size: int, launches: list[str]) -> None:
    """No rows, one, and up to two chunks, in an order drawn at random; more with HECATE_TESTS=all."""
    sizes = ([0, 1, 4, 9], 3) if ALL else ([0, 1, 5], 1)
    counts = np.random.default_rng(world_size).choice(sizes[0], (sizes[1], world_size, world_size))
    speeds = (0.01,) + (1.0,) * (world_size - 1)
    run(Case(counts, seed=world_size, speeds=speeds), DEVICE)
    assert set(launches) == {"put_rows", "post_words", "wait_words", "take_rows"}


@settings(max_examples=100 if ALL else 4, deadline=None)
@given(cases(most_exchanges=2, most_ranks=3))
def test_rows_come_there_and_back_in_any_order_of_things(case: Case) -> None:
    run(case, DEVICE)


def test_a_rank_that_never_comes_is_named() -> None:
    exchanges = Exchanges(skewed([5, 1, 0], exchanges=1), DEVICE)
    ranks = Ranks(3, segment=SEGMENT, seed=1, device=DEVICE)
    ranks.run([exchanges.program(t, rank) for rank, t in enumerate(ranks.transports)], absent={1})
    with pytest.raises(ExchangeFailed, match=r"rank 2 waited in vain for ranks \[1\]"):
        ranks.transports[2].check()


def test_one_rank_waits_for_nobody(launches: list[str]) -> None:
    transport = Transport(local_windows(1, SEGMENT, DEVICE)[0], seconds=1.0)
    rows = whole_numbers(6, WIDTH)
    assert torch.equal(all_to_all(transport, rows, [6], [6]), rows)
    transport.check()
    assert launches == ["put_rows", "post_words", "wait_words", "take_rows"] * 2


@pytest.mark.parametrize("programs", [1, 3])
def test_a_program_brings_many_tiles(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one without any of them brings none."""
    monkeypatch.setattr(links, "_PROGRAMS", programs)
    run(skewed([9, 0, 5], exchanges=1), DEVICE)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each load and each store of a program asks for."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[int] = []

    def counted(name: str, mask_at: int) -> None:
        inner = getattr(InterpreterBuilder, name)

        def call(self: Any, pointers: Any, *args: Any) -> Any:
            found.append(int(args[mask_at].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)
            return inner(self, pointers, *args)

        monkeypatch.setattr(InterpreterBuilder, name, call)

    counted("create_masked_load", 0)
    counted("create_masked_store", 1)
    return found


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter does")
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_as_much_is_touched_as_rows_travel(world_size: int, touched: list[int]) -> None:
    """Read and written once on each side, and written once behind those that come."""
    width, room, capacity = 2048, 40, 4
    counts = np.random.default_rng(world_size).choice([0, 1, 3, 5], (world_size, world_size))
    row_bytes = width * 4
    views = local_windows(world_size, capacity * row_bytes, DEVICE)
    transports = [Transport(view, seconds=0.0) for view in views]
    rows = [whole_numbers(int(sent.sum()), width, seed=rank) for rank, sent in enumerate(counts)]
    outs = [torch.full((room, width), torch.nan) for _ in range(world_size)]
    # All ranks do a step before any does the next.
    steps = zip(
        *(
            transports[rank].steps(
                Rows(rows[rank]), index_of(*sent.tolist()), Rows(outs[rank]), most=5, wire=torch.float32
            )
            for rank, sent in enumerate(counts)
        ),
        strict=True,
    )
    for _ in steps:
        pass
    for rank, out in enumerate(outs):
        came = torch.cat([rows[source].split(counts[source].tolist())[rank] for source in range(world_size)])
        clear_rows_behind(out, index_of(len(came)), torch.zeros((), dtype=torch.bool))
        assert torch.equal(out[: len(came)], came) and not out[len(came) :].any()
    travel = int(counts.sum())
    wanted = (4 * travel + world_size * room - travel) * row_bytes
    # Counts, orders and words are little beside rows.
    assert wanted <= sum(touched) < 1.1 * wanted
