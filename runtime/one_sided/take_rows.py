"""Rows that others have written into this rank's window, brought to their places."""

import torch
from torch import Tensor

from hecate.runtime.kernels.gather_rows import CONFIGS
from hecate.runtime.kernels.launch import launch, rows_class, runs_on, tl, tuned
from hecate.runtime.one_sided.links import (
    Chunk,
    Rows,
    capacity_of,
    checked_rows,
    locate,
    padded,
    programs,
    row_bytes,
    share_out,
)


def take_rows(window: Tensor, rows: Rows, chunk: Chunk, wire: torch.dtype) -> None:
    """Copy one chunk of each link out of a window.

    >>> window = torch.zeros(1, 2, 128, dtype=torch.uint8)
    >>> window.view(torch.float32)[0, :, :2] = torch.tensor([[3.0, 0.0], [1.0, 2.0]])
    >>> none, out = torch.zeros(2, dtype=torch.int64), torch.empty(3, 1)
    >>> rows = Rows(out, torch.tensor([2, 0, 1]))
    >>> take_rows(window, rows, Chunk(none, torch.tensor([1, 2]), none, none, 0), torch.float32)
    >>> out.tolist()
    [[1.0], [2.0], [3.0]]

    Args:
        window: uint8 ``[places, W, bytes]``, a multiple of 128.
        rows: where rows go, which come rank by rank; contiguous. The kernel casts float32, bfloat16 and float16;
            others are moved as they are.
        chunk: which others have told of.
        wire: the dtype in which rows lie in windows.

    Raises:
        TypeError: an index or a number is not int64, or rows would be cast that are no floats.
        ValueError: a shape or a device does not fit, or the rows are not contiguous.
    """
    out, kind = checked_rows("take_rows", rows, chunk, window, wire)
    if not rows.tensor.is_contiguous():
        raise ValueError("take_rows: writes into contiguous rows only")
    if rows.count <= chunk.first or out.shape[1] == 0:
        return
    if not runs_on(out.device):
        take_rows_reference(window, rows, chunk, wire)
        return
    source, ranks, width = window.view(kind), window.shape[1], out.shape[1]
    capacity = capacity_of(window, rows.tensor, wire)
    launch(
        _take_rows,
        programs(rows, chunk.first, capacity, ranks, width),
        source,
        chunk.receives if rows.index is None else rows.index.contiguous(),
        out,
        chunk.receives,
        chunk.told,
        chunk.late,
        rows.count,
        width,
        chunk.first,
        capacity,
        source.shape[2] // 16,
        ranks,
        rows_class(rows.count),
        INDEXED=rows.index is not None,
        PLACES=source.shape[0],
        RANKS=padded(ranks),
    )


def take_rows_reference(window: Tensor, rows: Rows, chunk: Chunk, wire: torch.dtype) -> None:
    """Take rows as :func:`take_rows` does, in plain torch, which reads the counts on the host."""
    capacity, begin, size = capacity_of(window, rows.tensor, wire), 0, row_bytes(rows.tensor, wire)
    number, links = chunk.told.tolist(), chunk.links.tolist()
    for peer, count in enumerate(chunk.receives.tolist()):
        first, last = begin + chunk.first, min(begin + min(count, chunk.first + capacity), rows.count)
        if links[peer] and last > first:
            came = window[number[peer] % window.shape[0], peer, : (last - first) * size].view(wire)
            values = came.view(last - first, *rows.tensor.shape[1:]).to(rows.tensor.dtype)
            rows.tensor[rows.between(first, last)] = values
        begin += count


@tuned(CONFIGS, key=["width", "tuned_for"], varying=["count", "first", "capacity", "sixteens", "tuned_for"])
def _take_rows(
    window,
    index,
    out,
    receives,
    told,
    late,
    count,
    width,
    first,
    capacity,
    sixteens,
    ranks,
    tuned_for,
    INDEXED: tl.constexpr,
    PLACES: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    links, sizes, parts, ends = share_out(receives, late, 0, first, capacity, ranks, RANKS, BLOCK_ROWS)
    blocks = tl.cdiv(width, BLOCK_COLS)
    for part in range(tl.program_id(0), tl.max(ends, 0) * blocks, tl.num_programs(0)):
        c = (part % blocks).to(tl.int32) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        link, within, row, comes = locate(
            index, links, sizes, parts, ends, part // blocks, count, first, INDEXED, RANKS, BLOCK_ROWS
        )
        source = ((tl.load(told + link) % PLACES) * ranks + link) * sixteens * 16 + within * width
        mask = comes[:, None] & (c < width)[None, :]
        values = tl.load(window + source[:, None] + c[None, :], mask=mask, other=0.0)
        tl.store(out + row[:, None] * width + c[None, :], values.to(out.dtype.element_ty), mask=mask)
