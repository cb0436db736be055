"""Links between ranks: common parts of the kernels that write into other ranks' memory.

A link leads from one rank to another, or to itself. Its rows travel in chunks as large as a segment of the window.
Chunks are numbered from 1 on, for ever, alike for both links between two ranks: chunk n lies at place ``n % places``.
A word names a chunk and how many rows the link has in this exchange.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import jit, tl
from hecate.runtime.kernels.operands import FLOATS, check_index, check_rows, flat_rows
from hecate.runtime.one_sided.windows import ALIGNMENT

# A word is the number of a chunk and, in so many bits, the rows of its link. The number has 35: a year of a thousand
# chunks a second.
COUNT_BITS = 28
# A program adds up the rows of all links before its own, and compares each rank with each other one.
MOST_RANKS = 128
# Programs that bring the tiles of a chunk, one after the other: about what a GPU runs at a time. Not tuned.
_PROGRAMS = 2048


@dataclass(frozen=True)
class Chunk:
    """A chunk of all links of a rank, those that lead away from it and those that lead to it.

    The two links between this rank and another take part if one of them has rows from ``first`` on; in the first
    chunk all do. Both ranks know that alike. Ranks that did not come are left out.

    Attributes:
        sends: rows to each rank in this exchange, int64 ``[W]``, contiguous as the others.
        receives: rows from each, int64 ``[W]``; known after the wait of the first chunk.
        told: chunks of which each rank has been told, with this one from its signal on, int64 ``[W]``.
        late: 1 for ranks that did not come in time, else 0, int64 ``[W]``.
        first: the first row of each link that this chunk has.
    """

    sends: Tensor
    receives: Tensor
    told: Tensor
    late: Tensor
    first: int

    @property
    def links(self) -> Tensor:
        """Ranks with which it is exchanged, bool ``[W]``."""
        more = torch.maximum(self.sends, self.receives) > self.first
        return (self.late == 0) & (more | (self.first == 0))

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.sends, self.receives, self.told, self.late


@dataclass(frozen=True)
class Rows:
    """Rows, and their places in the order of ranks in which they travel.

    Attributes:
        tensor: ``[R, ...]``.
        index: int64 ``[n]``: place i has row ``index[i]``, if a row travels there; without it place i has row i.
    """

    tensor: Tensor
    index: Tensor | None = None

    @property
    def count(self) -> int:
        return self.tensor.shape[0] if self.index is None else self.index.shape[0]

    def between(self, first: int, last: int) -> Tensor | slice:
        """Return which rows are at these places, to index the tensor with."""
        return slice(first, last) if self.index is None else self.index[first:last]


def rows_of_places(places: Tensor) -> Tensor:
    """Return the row at each place from the place of each row, int64 ``[n]``.

    >>> rows_of_places(torch.tensor([1, 5, 0])).tolist()
    [2, 0, 0]

    Numbers at places to which no row goes mean nothing.
    """
    count = places.shape[0]
    # Places that no rank reads fall together behind the others.
    rows = places.new_zeros(count + 1)
    rows.scatter_(0, places.clamp_max(count), torch.arange(count, device=places.device))
    return rows[:count]


def checked_rows(who: str, rows: Rows, chunk: Chunk, window: Tensor, wire: torch.dtype) -> tuple[Tensor, torch.dtype]:
    """Return rows flat, and their dtype in a window; TypeError if it is not ``wire`` and no kernel casts them.

    Raises as :func:`check_links`, too, and ValueError unless a window is ``[places, W, bytes]`` with segments that
    begin where vectors may.
    """
    check_rows(who, rows.tensor)
    check_links(who, chunk)
    if rows.index is not None:
        check_index(who, rows.index, rows.tensor.device)
    if window.dim() != 3 or window.dtype != torch.uint8 or window.shape[2] % ALIGNMENT or not window.is_contiguous():
        raise ValueError(
            f"{who}: expected a window of bytes [places, W, a multiple of {ALIGNMENT}], got {list(window.shape)}"
        )
    flat = flat_rows(rows.tensor)
    if flat.dtype in FLOATS and wire in FLOATS:
        return flat, wire
    if flat.dtype != wire:
        raise TypeError(f"rows of {flat.dtype} do not travel as {wire}")
    return flat.contiguous().view(torch.uint8), torch.uint8


def row_bytes(tensor: Tensor, wire: torch.dtype) -> int:
    """Return the bytes of one row in a window."""
    return tensor.shape[1:].numel() * wire.itemsize


def capacity_of(window: Tensor, tensor: Tensor, wire: torch.dtype) -> int:
    """Return how many rows a segment of ``window`` ``[places, W, bytes]`` holds."""
    return window.shape[2] // max(1, row_bytes(tensor, wire))


def check_links(who: str, chunk: Chunk) -> None:
    """Raise unless counts, chunks and late ranks are int64 ``[W]`` without gaps, and no more than kernels take."""
    for numbers in chunk.numbers:
        if numbers.dtype != torch.int64:
            raise TypeError(f"{who}: expected numbers of int64, got {numbers.dtype}")
        if numbers.shape != chunk.sends.shape or numbers.dim() != 1:
            raise ValueError(f"{who}: expected one number for each link, got {list(numbers.shape)}")
        if numbers.device != chunk.sends.device or not numbers.is_contiguous():
            raise ValueError(f"{who}: numbers of links are on two devices or have gaps")
    if chunk.sends.shape[0] > MOST_RANKS:
        raise ValueError(f"{who}: {chunk.sends.shape[0]} ranks, at most {MOST_RANKS} can share their memory")


def padded(ranks: int) -> int:
    """Return the next power of two."""
    return max(2, 1 << (ranks - 1).bit_length())


def programs(rows: Rows, first: int, capacity: int, ranks: int, width: int) -> Callable[[Mapping[str, int]], int]:
    """Return the number of programs for the rows of a chunk, for :func:`launch`: no more than it can have tiles."""
    # At most ``count - first`` rows are left on all links. Each link may have a tile that is not full.
    most = min(ranks * capacity, rows.count - first)
    return lambda meta: min(_PROGRAMS, (-(-most // meta["BLOCK_ROWS"]) + ranks) * -(-width // meta["BLOCK_COLS"]))


@jit
def share_out(counts, late, shift, first, capacity, ranks, RANKS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return for each link its number, its rows in all and in the chunk, and where its tiles end.

    Ranks begin with different links, from ``shift`` on, so that not all write to the same rank.
    """
    p = tl.arange(0, RANKS)
    link = (p + shift) % ranks
    sizes = tl.load(counts + link, mask=p < ranks, other=0)
    goes = tl.load(late + link, mask=p < ranks, other=1) == 0
    rows = tl.where(goes, tl.minimum(tl.maximum(sizes - first, 0), capacity), 0)
    return link, sizes, rows, tl.cumsum(tl.cdiv(rows, BLOCK_ROWS), 0)


@jit
def locate(
    index,
    link,
    sizes,
    rows,
    ends,
    tile,
    count,
    first,
    INDEXED: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Return the link of a tile of a chunk, its rows' numbers in the chunk, which rows they are, and which exist."""
    p = tl.arange(0, RANKS)
    # Count the links of which no tile is left.
    before = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.max(tl.where(p < before, ends, 0), 0)
    own = tl.sum(tl.where(p == before, link, 0), 0)
    within = (tile - begin) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = tl.sum(tl.where(link < own, sizes, 0), 0) + first + within
    travels = (within < tl.sum(tl.where(p == before, rows, 0), 0)) & (place < count)
    row = place
    if INDEXED:
        row = tl.load(index + place, mask=travels, other=0)
    return own, within, row, travels
