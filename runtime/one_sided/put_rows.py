"""Rows picked and written into the windows of the ranks to which they go."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hecate.runtime.kernels.gather_rows import CONFIGS
from hecate.runtime.kernels.launch import launch, rows_class, runs_on, tl, tuned
from hecate.runtime.one_sided.links import Chunk, Rows, capacity_of, checked_rows, locate, padded, programs, share_out


def put_rows(
    rows: Rows, chunk: Chunk, windows: Sequence[Tensor], addresses: Tensor, rank: int, wire: torch.dtype
) -> None:
    """Write one chunk of each link into the window of the rank that it leads to.

    >>> windows = [torch.zeros(1, 2, 128, dtype=torch.uint8) for _ in range(2)]
    >>> none, sends = torch.zeros(2, dtype=torch.int64), torch.tensor([1, 2])
    >>> addresses = torch.tensor([window.data_ptr() for window in windows])
    >>> rows = Rows(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 1]))
    >>> put_rows(rows, Chunk(sends, none, none, none, 0), windows, addresses, 0, torch.float32)
    >>> [window.view(torch.float32)[0, 0, :2].tolist() for window in windows]
    [[3.0, 0.0], [1.0, 2.0]]

    Args:
        rows: to send, rank by rank. The kernel casts float32, bfloat16 and float16; others are moved as they are.
        chunk: of which no rank has been told yet.
        windows: of each rank, uint8 ``[places, W, bytes]``, a multiple of 128.
        addresses: where they begin, int64 ``[W]`` on the device of the rows.
        rank: the writer.
        wire: the dtype in which rows lie in windows.

    Raises:
        TypeError: an index or a number is not int64, or rows would be cast that are no floats.
        ValueError: a shape or a device does not fit.
    """
    source, kind = checked_rows("put_rows", rows, chunk, windows[rank], wire)
    if rows.count <= chunk.first or source.shape[1] == 0:
        return
    if not runs_on(source.device):
        put_rows_reference(rows, chunk, windows, rank, wire)
        return
    own, ranks, width = windows[rank].view(kind), len(windows), source.shape[1]
    capacity = capacity_of(windows[rank], rows.tensor, wire)
    launch(
        _put_rows,
        programs(rows, chunk.first, capacity, ranks, width),
        source,
        chunk.sends if rows.index is None else rows.index.contiguous(),
        own,
        addresses,
        chunk.sends,
        chunk.told,
        chunk.late,
        rows.count,
        width,
        source.stride(0),
        chunk.first,
        capacity,
        own.shape[2] // 16,
        rank,
        ranks,
        rows_class(rows.count),
        INDEXED=rows.index is not None,
        PLACES=own.shape[0],
        RANKS=padded(ranks),
    )


def put_rows_reference(rows: Rows, chunk: Chunk, windows: Sequence[Tensor], rank: int, wire: torch.dtype) -> None:
    """Put rows as :func:`put_rows` does, in plain torch, which reads the counts on the host."""
    capacity, begin = capacity_of(windows[rank], rows.tensor, wire), 0
    number, links = (chunk.told + 1).tolist(), chunk.links.tolist()
    for peer, count in enumerate(chunk.sends.tolist()):
        chosen = rows.between(begin + chunk.first, begin + min(count, chunk.first + capacity))
        if links[peer]:
            leaving = rows.tensor[chosen].to(wire).contiguous().view(-1).view(torch.uint8)
            windows[peer][number[peer] % windows[peer].shape[0], rank, : len(leaving)] = leaving
        begin += count


@tuned(CONFIGS, key=["width", "tuned_for"], varying=["count", "first", "capacity", "sixteens", "rank", "tuned_for"])
def _put_rows(
    rows,
    index,
    own,
    addresses,
    sends,
    told,
    late,
    count,
    width,
    stride,
    first,
    capacity,
    sixteens,
    rank,
    ranks,
    tuned_for,
    INDEXED: tl.constexpr,
    PLACES: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    links, sizes, parts, ends = share_out(sends, late, rank, first, capacity, ranks, RANKS, BLOCK_ROWS)
    blocks = tl.cdiv(width, BLOCK_COLS)
    for part in range(tl.program_id(0), tl.max(ends, 0) * blocks, tl.num_programs(0)):
        c = (part % blocks).to(tl.int32) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        link, within, row, goes = locate(
            index, links, sizes, parts, ends, part // blocks, count, first, INDEXED, RANKS, BLOCK_ROWS
        )
        number = tl.load(told + link) + 1
        window = tl.multiple_of(tl.load(addresses + link).to(tl.pointer_type(own.dtype.element_ty)), 16)
        target = ((number % PLACES) * ranks + rank) * sixteens * 16 + within * width
        mask = goes[:, None] & (c < width)[None, :]
        values = tl.load(rows + row[:, None] * stride + c[None, :], mask=mask, other=0.0)
        tl.store(window + target[:, None] + c[None, :], values.to(own.dtype.element_ty), mask=mask)
