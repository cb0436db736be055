"""Order the rows of an exchange: which segments of a rank's rows leave in turn, and where those that come belong.

Rows are sorted by expert; they leave ordered by (destination, slot), and at the destination they are brought into the
order (slot, source). They may travel in several chunks, each with its share of every slot's and link's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.planner.dispatch import Quotas


@dataclass(frozen=True, eq=False)
class Segments:
    """One chunk of an exchange, seen from one rank: int64 arrays.

    Attributes:
        splits: rows to (line 0) and from (line 1) each rank, ``[2, W]``.
        leaving: where each segment begins among the rank's rows, and its length, in the order in which they leave:
            two ``[n]``. Together the segments of all chunks are all rows.
        arriving: where each begins among the rows that come, and its length, by (slot, source): two ``[S * W]``.
    """

    splits: Ints
    leaving: tuple[Ints, Ints]
    arriving: tuple[Ints, Ints]


def segments_of(quotas: Quotas, chunk: int = 0, chunks: int = 1) -> Segments:
    """Order the rows of ``quotas``, or one chunk's part of them."""
    placement = quotas.placement
    # Rows that leave: a segment is the rows of one expert that go to one rank; the first go to the lowest rank.
    experts, destinations = placement.pairs
    order, first = placement.leaving, np.cumsum(quotas.sent) - quotas.sent
    begin, leaving = _cut(quotas.sent, experts, chunk, chunks)
    # Rows that come, [W, S] of each source for each slot.
    _, arriving = _cut(quotas.received.T, placement.slots_on(quotas.rank), chunk, chunks)
    arrival = (np.cumsum(arriving) - arriving.reshape(-1)).reshape(arriving.shape)
    sent = np.bincount(destinations, leaving, minlength=len(arriving)).astype(np.int64)
    return Segments(
        splits=np.stack([sent, arriving.sum(1)]),
        leaving=((first + begin)[order], leaving[order]),
        arriving=(arrival.T.reshape(-1), arriving.T.reshape(-1)),
    )


def _cut(lengths: Ints, experts: Ints, chunk: int, chunks: int) -> tuple[Ints, Ints]:
    """Return begin and length of one chunk's part of each segment; sender and receiver cut alike."""
    # Each expert's remainder goes to another chunk, so that chunks stay even where segments are short.
    begin, end = ((lengths * c + experts % chunks) // chunks for c in (chunk, chunk + 1))
    return begin, end - begin
