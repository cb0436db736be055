"""What the kernels that write into other ranks' memory have in common.

A link leads from one rank to one other, or to itself. Its rows travel in chunks of what a segment of the window
holds, and the chunks of a link are numbered from 1 on, for ever: chunk n lies at place ``n % places``. A word names a
chunk and how many rows the link has in this exchange.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hecate.runtime.comm.windows import ALIGNMENT
from hecate.runtime.kernels.launch import jit, tl
from hecate.runtime.kernels.operands import FLOATS, flat_rows

# A word is the number of a chunk and, in so many bits, the rows of its link. The number has 35: a year of a thousand
# chunks a second.
COUNT_BITS = 28
# Each program adds up the rows of all links before its own.
MOST_RANKS = 128


@dataclass(frozen=True)
class Chunk:
    """One chunk of each link of a rank: of those that lead away from it, or of those that lead to it.

    A link takes part if it has rows from ``first`` on; in the first chunk each does. Nothing is done with one whose
    other rank did not come.

    Attributes:
        counts: rows of each link in this exchange, int64 ``[W]``, contiguous as the others.
        done: chunks of each link before this one, int64 ``[W]``.
        late: 1 for ranks that did not come in time, else 0, int64 ``[W]``.
        first: the first row of each link that this chunk has.
    """

    counts: Tensor
    done: Tensor
    late: Tensor
    first: int

    @property
    def links(self) -> Tensor:
        """Which take part, bool ``[W]``."""
        return (self.late == 0) & ((self.counts > self.first) | (self.first == 0))


@dataclass(frozen=True)
class Rows:
    """Rows, and their places in the order of ranks in which they travel.

    Attributes:
        tensor: ``[R, ...]``.
        index: int64 ``[n]``: place i has row ``index[i]``; without it place i has row i. A place beyond the rows that
            travel has none.
        by_row: place ``index[i]`` has row i instead.
    """

    tensor: Tensor
    index: Tensor | None = None
    by_row: bool = False

    @property
    def count(self) -> int:
        return self.tensor.shape[0] if self.index is None else self.index.shape[0]

    def by_place(self) -> "Rows":
        """The same rows, with an index of rows: kernels go through places.

        >>> Rows(torch.empty(3, 1), torch.tensor([1, 5, 0]), by_row=True).by_place().index.tolist()
        [2, 0, 0]

        What the index says of places to which no row goes means nothing.
        """
        if self.index is None or not self.by_row:
            return self
        count = self.index.shape[0]
        # Places that nobody reads fall together behind the others.
        rows = self.index.new_zeros(count + 1)
        rows.scatter_(0, self.index.clamp_max(count), torch.arange(count, device=self.index.device))
        return Rows(self.tensor, rows[:count])


def as_numbers(tensor: Tensor, wire: torch.dtype) -> tuple[Tensor, torch.dtype]:
    """Rows flat, and what they are in a window: floats that kernels cast, or bytes that only move.

    Raises:
        TypeError: rows that no kernel casts have another dtype than what travels.
    """
    flat = flat_rows(tensor)
    if tensor.dtype in FLOATS and wire in FLOATS:
        return flat, wire
    if tensor.dtype != wire:
        raise TypeError(f"rows of {tensor.dtype} do not travel as {wire}")
    return flat.contiguous().view(torch.uint8), torch.uint8


def row_bytes(tensor: Tensor, wire: torch.dtype) -> int:
    """Of one row in a window."""
    return tensor.shape[1:].numel() * wire.itemsize


def capacity_of(window: Tensor, tensor: Tensor, wire: torch.dtype) -> int:
    """How many rows a segment of ``window`` ``[places, W, bytes]`` holds."""
    return window.shape[2] // max(1, row_bytes(tensor, wire))


def check_links(who: str, chunk: Chunk) -> None:
    """Raise unless counts, chunks and late ranks are int64 ``[W]`` without gaps, and no more than kernels take."""
    for numbers in (chunk.counts, chunk.done, chunk.late):
        if numbers.dtype != torch.int64:
            raise TypeError(f"{who}: expected numbers of int64, got {numbers.dtype}")
        if numbers.shape != chunk.counts.shape or numbers.dim() != 1:
            raise ValueError(f"{who}: expected one number for each link, got {list(numbers.shape)}")
        if numbers.device != chunk.counts.device or not numbers.is_contiguous():
            raise ValueError(f"{who}: numbers of links are on two devices or have gaps")
    if chunk.counts.shape[0] > MOST_RANKS:
        raise ValueError(f"{who}: {chunk.counts.shape[0]} ranks, at most {MOST_RANKS} can share their memory")


def check_window(who: str, window: Tensor) -> None:
    """Raise ValueError unless a window is ``[places, W, bytes]`` with segments that begin where vectors may."""
    if window.dim() != 3 or window.dtype != torch.uint8 or window.shape[2] % ALIGNMENT or not window.is_contiguous():
        raise ValueError(
            f"{who}: expected a window of bytes [places, W, a multiple of {ALIGNMENT}], got {list(window.shape)}"
        )


def padded(ranks: int) -> int:
    """The next power of two."""
    return max(2, 1 << (ranks - 1).bit_length())


def rows_by_place(rows: Rows, total: int) -> tuple[Tensor, Tensor]:
    """For the references: places of which there are rows, and these rows, int64 ``[m], [m]``."""
    count = torch.arange(rows.count, dtype=torch.int64, device=rows.tensor.device)
    index = count if rows.index is None else rows.index
    places, chosen = (index, count) if rows.by_row else (count, index)
    travels = places < total
    return places[travels], chosen[travels]


@jit
def locate(
    index, counts, late, tile, shift, count, first, capacity, ranks,
    INDEXED: tl.constexpr, RANKS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Of one tile of a chunk: its link, its rows' numbers in the chunk, which rows they are, which the chunk has.

    Tiles go round the links, and begin at ``shift``: not all ranks write to the same one at the same time.
    """
    link = (tile + shift) % ranks
    within = (tile // ranks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    p = tl.arange(0, RANKS)
    sizes = tl.load(counts + p, mask=p < ranks, other=0)
    place = tl.sum(tl.where(p < link, sizes, 0), 0) + first + within
    size = tl.sum(tl.where(p == link, sizes, 0), 0)
    travels = (within < capacity) & (first + within < size) & (place < count) & (tl.load(late + link) == 0)
    row = place
    if INDEXED:
        row = tl.load(index + place, mask=travels, other=0)
    return link, within, row, travels
