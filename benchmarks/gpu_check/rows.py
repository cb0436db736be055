"""Kernels that move rows, and those that say which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_check.case import EQUAL, Case, Maker, bytes_of
from hecate.runtime.comm.collectives import on_device
from hecate.runtime.kernels import clear_rows, expand_segments, gather_rows, scatter_rows
from hecate.runtime.one_sided import split_rows
from hecate.runtime.ops.ticket import join_segments


def gather(make: Maker, dtype: torch.dtype) -> Iterator[Case]:
    """All rows; and the first half of them, where only the device knows how many."""
    rows, index = make.numbers(make.rows, make.sizes.hidden, dtype=dtype), make.order(make.rows)
    wire = torch.bfloat16 if dtype is torch.float32 else dtype
    half = make.rows // 2
    used = torch.tensor([half], device=make.device)
    yield Case(
        dtype,
        lambda: gather_rows.gather_rows(rows, index, wire),
        lambda: gather_rows.gather_rows_reference(rows, index, wire),
        None,
        EQUAL,
        bytes=bytes_of(rows, index) + rows.numel() * wire.itemsize,
    )
    yield Case(
        dtype,
        lambda: gather_rows.gather_rows(rows, index, wire, used=used)[:half],
        lambda: gather_rows.gather_rows_reference(rows, index[:half], wire),
        None,
        EQUAL,
        note="half",
        bytes=bytes_of(rows[:half], index[:half]) + rows[:half].numel() * wire.itemsize,
    )


def scatter(make: Maker, dtype: torch.dtype) -> Case:
    wire = torch.bfloat16 if dtype is torch.float32 else dtype
    index, count = make.order(make.rows)[: make.rows * 3 // 4], make.rows
    rows = make.numbers(len(index), make.sizes.hidden, dtype=wire)
    return Case(
        dtype,
        lambda: scatter_rows.scatter_rows(rows, index, count, dtype),
        lambda: scatter_rows.scatter_rows_reference(rows, index, count, dtype),
        None,
        EQUAL,
        bytes=bytes_of(rows, index) + count * make.sizes.hidden * dtype.itemsize,
    )


def clear(make: Maker, dtype: torch.dtype) -> Iterator[Case]:
    """What follows a product of torch, where there are few rows behind the last slot, and one slot without any."""
    offs, inner = make.offsets(), make.sizes.inner
    rows = make.numbers(make.rows, inner, dtype=dtype)
    matrices = make.numbers(len(offs), inner, make.sizes.hidden, dtype=dtype)
    behind, empty = make.rows - int(offs[-1]), int((torch.diff(offs, prepend=offs.new_zeros(1)) == 0).sum())
    of_rows = clear_rows.clear_rows_behind, clear_rows.clear_rows_behind_reference
    of_slots = clear_rows.clear_empty_slots, clear_rows.clear_empty_slots_reference
    yield _clear("rows", rows, offs, of_rows, behind)
    # As an exchange does it, which may have lost them.
    in_room = tuple(partial(way, lost=torch.zeros((), dtype=torch.bool, device=make.device)) for way in of_rows)
    yield _clear("room", rows, offs, in_room, behind)
    yield _clear("slots", matrices, offs, of_slots, empty)


def _clear(
    note: str, given: Tensor, offs: Tensor, ways: tuple[Callable[[Tensor, Tensor], None], ...], cleared: int
) -> Case:
    """``cleared`` of the lines of ``given`` are written, and nothing is read."""
    timed = given.clone()

    def call(way: Callable[[Tensor, Tensor], None], to: Tensor) -> Tensor:
        way(to, offs)
        return to

    ours, reference = ways
    return Case(
        given.dtype,
        lambda: call(ours, given.clone()),
        lambda: call(reference, given.clone()),
        None,
        EQUAL,
        note=note,
        timed=(lambda: call(ours, timed), lambda: call(reference, timed)),
        bytes=cleared * given[0].numel() * given.dtype.itemsize,
    )


def expand(make: Maker, dtype: torch.dtype) -> Case:
    """Indices have one dtype; beside it what the host would do, with its copy to the device."""
    lengths = torch.diff(make.offsets().long().cpu(), prepend=torch.zeros(1, dtype=torch.int64)).repeat(8)
    starts = torch.arange(len(lengths)) * 1000
    first, ends, total = starts.to(make.device), lengths.cumsum(0).to(make.device), int(lengths.sum())
    return Case(
        torch.int64,
        lambda: expand_segments.expand_segments(first, ends, total),
        lambda: expand_segments.expand_segments_reference(first, ends, total),
        lambda: on_device(join_segments(starts.numpy(), lengths.numpy()), make.device),
        {torch.int64: 0.0},
        same=True,
        bytes=8 * total,
    )


def split(make: Maker, dtype: torch.dtype) -> Case:
    """Nodes of two ranks, and two holders of each expert on two nodes."""
    ranks, experts = make.sizes.ranks, 8 * make.sizes.owned
    counts = (make.numbers(ranks, experts, dtype=torch.float32).exp() * make.sizes.choices).long()
    total, expert = counts.sum(0), torch.arange(experts, device=make.device)
    wanted = torch.zeros(experts, ranks, dtype=torch.int64, device=make.device)
    wanted[expert, expert % ranks] = total // 2
    wanted[expert, (expert + 2) % ranks] += total - total // 2
    order = torch.arange(ranks, device=make.device)
    operands = counts, wanted, order, order // 2, ranks - 1
    return Case(
        torch.int64,
        lambda: split_rows.split_rows(*operands),
        lambda: split_rows.split_rows_reference(*operands),
        None,
        {torch.int64: 0.0},
        bytes=2 * bytes_of(counts, wanted),
    )
