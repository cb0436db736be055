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
# Each program compares its rows with the rows of each link.
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

    @property
    def order(self) -> int:
        """As kernels are told: 0 without an index, 1 with rows in it, 2 with places."""
        return 0 if self.index is None else 2 if self.by_row else 1


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
    index, counts, late, i, count, first, capacity, ranks, ORDER: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    """Of the entries ``i`` of an order of rows: row, link, number in the chunk, and whether the chunk has it."""
    place = i
    row = i
    if ORDER == 1:
        row = tl.load(index + i, mask=i < count, other=0)
    if ORDER == 2:
        place = tl.load(index + i, mask=i < count, other=0)
    # Behind the last link there is none.
    p = tl.arange(0, RANKS)
    sizes = tl.load(counts + p, mask=p < ranks, other=0)
    before = tl.cumsum(sizes, 0)[None, :] <= place[:, None]
    link = tl.sum(before.to(tl.int64), 1)
    within = place - tl.sum(tl.where(before, sizes[None, :], 0), 1) - first
    travels = (i < count) & (link < ranks) & (within >= 0) & (within < capacity)
    travels = travels & (tl.load(late + link, mask=travels, other=1) == 0)
    return row, link, within, travels
