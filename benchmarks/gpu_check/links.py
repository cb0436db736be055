"""Kernels that write into other ranks' memory, which here is all in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_check.case import EQUAL, Case, Maker, bytes_of
from hecate.runtime.one_sided import post_words, put_rows, take_rows, wait_words
from hecate.runtime.one_sided.links import COUNT_BITS, Chunk, Rows
from hecate.runtime.one_sided.windows import PLACES, Windows, local_windows

# So many windows of one GPU each hold all that a rank sends to one of them, and a quarter more.
RANKS, ME = 8, 3


def put(make: Maker, dtype: torch.dtype) -> Case:
    chunk, ours, theirs = _chunk(make), _windows(make, dtype), _windows(make, dtype)
    leaving = Rows(make.numbers(make.rows, make.sizes.hidden, dtype=dtype), make.order(make.rows))
    addresses = torch.tensor([window.data_ptr() for window in ours.data], device=make.device)

    def by_kernel() -> Tensor:
        put_rows.put_rows(leaving, chunk, ours.data, addresses, ME, dtype)
        return torch.stack([window[:, ME].view(dtype) for window in ours.data])

    def by_reference() -> Tensor:
        put_rows.put_rows_reference(leaving, chunk, theirs.data, ME, dtype)
        return torch.stack([window[:, ME].view(dtype) for window in theirs.data])

    return Case(
        dtype,
        by_kernel,
        by_reference,
        None,
        EQUAL,
        timed=(
            lambda: put_rows.put_rows(leaving, chunk, ours.data, addresses, ME, dtype),
            lambda: put_rows.put_rows_reference(leaving, chunk, theirs.data, ME, dtype),
        ),
        bytes=2 * bytes_of(leaving.tensor),
    )


def take(make: Maker, dtype: torch.dtype) -> Case:
    chunk, index = _chunk(make, told=1), make.order(make.rows)
    numbers = make.numbers(PLACES, RANKS, _windows(make, dtype).segment // dtype.itemsize, dtype=dtype)
    window = numbers.view(torch.uint8)

    def call(way: Callable[[Tensor, Rows, Chunk, torch.dtype], None]) -> Tensor:
        out = torch.zeros(make.rows, make.sizes.hidden, dtype=dtype, device=make.device)
        way(window, Rows(out, index), chunk, dtype)
        return out

    return Case(
        dtype,
        lambda: call(take_rows.take_rows),
        lambda: call(take_rows.take_rows_reference),
        None,
        EQUAL,
        # The zeros, too.
        bytes=3 * make.rows * make.sizes.hidden * dtype.itemsize,
    )


def post(make: Maker, dtype: torch.dtype) -> Case:
    ours, theirs = (local_windows(RANKS, 1, make.device)[ME] for _ in range(2))
    addresses = torch.tensor([board.data_ptr() for board in ours.signals], device=make.device)

    def by_kernel() -> Tensor:
        post_words.post_words(_chunk(make), ours.signals, addresses, ME)
        return torch.stack(list(ours.signals))

    def by_reference() -> Tensor:
        post_words.post_words_reference(_chunk(make), theirs.signals, ME)
        return torch.stack(list(theirs.signals))

    return Case(torch.int64, by_kernel, by_reference, None, {torch.int64: 0.0}, bytes=8 * RANKS)


def wait(make: Maker, dtype: torch.dtype) -> Case:
    """What a wait costs for which everyone has come."""
    words = torch.arange(RANKS, device=make.device) + (1 << COUNT_BITS)
    board = torch.stack([words, words])

    def by_kernel() -> Tensor:
        chunk = _chunk(make, told=1)
        wait_words.wait_words(board, chunk, seconds=1.0)
        return chunk.receives

    def by_reference() -> Tensor:
        chunk = _chunk(make, told=1)
        wait_words.wait_words_reference(board, chunk, seconds=1.0)
        return chunk.receives

    return Case(torch.int64, by_kernel, by_reference, None, {torch.int64: 0.0}, bytes=8 * RANKS)


def _chunk(make: Maker, *, told: int = 0) -> Chunk:
    """The first chunk of links of different lengths, which together are all rows; there and back alike."""
    even = make.rows // RANKS
    counts = torch.full((RANKS,), even, dtype=torch.int64, device=make.device)
    counts[0] += even // 4
    counts[1] += make.rows - int(counts.sum())
    return Chunk(counts, counts.clone(), torch.full_like(counts, told), torch.zeros_like(counts), 0)


def _rows_of_a_link(make: Maker) -> int:
    return make.rows // RANKS * 5 // 4 + RANKS


def _windows(make: Maker, dtype: torch.dtype) -> Windows:
    segment = _rows_of_a_link(make) * make.sizes.hidden * dtype.itemsize
    return local_windows(RANKS, segment, make.device)[ME]
