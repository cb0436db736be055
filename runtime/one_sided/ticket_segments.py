"""Segments of an exchange's indices, found on the device from the rows that a rank sends and receives.

A program is one expert that leaves, or one slot that fills; its lanes are the other ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.operands import check_index, check_turned
from hecate.runtime.one_sided.links import MOST_RANKS

# A single configuration: a few microseconds are not worth a trial.
CONFIGS = ({"BLOCK": 16, "num_warps": 4},)


class TicketSegments(NamedTuple):
    """The plan of one exchange, seen from one rank. A segment has the rows of one expert that go from rank to rank.

    Attributes:
        send_starts: where each segment begins in the rank's rows, int64 ``[W * E]``, by rank and slot order there.
        send_ends: where it ends in the send buffer.
        receive_starts: where each begins in the rows that arrive, int64 ``[S * W]``, by slot and source.
        receive_ends: where it ends in slot order.
        slot_offsets: where each slot's rows end, int32 ``[S]``.
        splits: rows to (line 0) and from (line 1) each rank, int64 ``[2, W]``.
    """

    send_starts: Tensor
    send_ends: Tensor
    receive_starts: Tensor
    receive_ends: Tensor
    slot_offsets: Tensor
    splits: Tensor


def ticket_segments(sends: Tensor, receives: Tensor, owners: Tensor, slots: Tensor) -> TicketSegments:
    """Order rows that leave by (destination, slot there), and rows that arrive by (slot, source).

    Rank 0 of two has 5 rows of expert 0 and 2 of expert 1. It owns the first, sends the rows of the second to rank 1,
    which owns it, and gets 3 rows of the first.

    >>> found = ticket_segments(
    ...     torch.tensor([[5, 0], [0, 2]]), torch.tensor([[5, 0], [3, 0]]), torch.tensor([0, 1]), torch.tensor([0])
    ... )
    >>> found.send_starts.tolist(), found.send_ends.tolist()
    ([0, 5, 5, 5], [5, 5, 7, 7])
    >>> found.slot_offsets.tolist(), found.splits.tolist()
    ([8], [[5, 2], [5, 3]])

    Args:
        sends: rows of each expert to each rank, int64 ``[E, W]``.
        receives: rows from each rank of each expert, int64 ``[W, E]``.
        owners: of each expert, int64 ``[E]``. At any rank its own experts come first, and the others by owner.
        slots: the experts that the rank holds, in slot order, int64 ``[S]``.

    Raises:
        TypeError: a tensor is not int64.
        ValueError: a shape or a device does not fit.
    """
    check_turned("ticket_segments", sends, receives)
    experts, ranks = sends.shape
    check_index("ticket_segments", owners, sends.device, experts)
    check_index("ticket_segments", slots, sends.device)
    if not runs_on(sends.device) or ranks > MOST_RANKS:
        return ticket_segments_reference(sends, receives, owners, slots)
    held, lanes = slots.shape[0], 1 << (ranks - 1).bit_length()
    # No program writes zeros where there are no experts or no slots.
    make = sends.new_empty if experts > 0 and held > 0 else sends.new_zeros
    found = TicketSegments(
        send_starts=sends.new_empty(experts * ranks),
        send_ends=sends.new_empty(experts * ranks),
        receive_starts=sends.new_empty(held * ranks),
        receive_ends=sends.new_empty(held * ranks),
        slot_offsets=sends.new_empty(held, dtype=torch.int32),
        splits=make(2, ranks),
    )
    if experts > 0:
        launch(
            _leaving,
            lambda meta: experts,
            sends.contiguous(),
            owners.contiguous(),
            found.send_starts,
            found.send_ends,
            found.splits,
            ranks,
            experts,
            RANKS=lanes,
        )
    if held > 0:
        launch(
            _arriving,
            lambda meta: held,
            receives.contiguous(),
            slots.contiguous(),
            found.receive_starts,
            found.receive_ends,
            found.slot_offsets,
            found.splits,
            ranks,
            experts,
            held,
            RANKS=lanes,
        )
    return found


def ticket_segments_reference(sends: Tensor, receives: Tensor, owners: Tensor, slots: Tensor) -> TicketSegments:
    """Find segments as :func:`ticket_segments` does, in plain torch."""
    rank = torch.arange(sends.shape[1], dtype=torch.int64, device=sends.device)
    # A rank's rows lie by expert; of one expert, those for the first rank come first.
    order = torch.where(owners == rank[:, None], -1, owners).argsort(dim=1, stable=True)
    starts, leaving = _before(sends).t().gather(1, order), sends.t().gather(1, order)
    # Rows come by (source, slot).
    arriving = receives.index_select(1, slots)
    arrival, arriving = _before(arriving).t().reshape(-1), arriving.t()
    return TicketSegments(
        send_starts=starts.reshape(-1),
        send_ends=leaving.reshape(-1).cumsum(0),
        receive_starts=arrival,
        receive_ends=arriving.reshape(-1).cumsum(0),
        slot_offsets=arriving.sum(1).cumsum(0).to(torch.int32),
        splits=torch.stack([leaving.sum(1), arriving.sum(0)]),
    )


def _before(lengths: Tensor) -> Tensor:
    """Return the sum of all lengths before each of them, line by line."""
    return (lengths.reshape(-1).cumsum(0) - lengths.reshape(-1)).view(lengths.shape)


@tuned(CONFIGS, key=[], varying=["ranks", "experts"])
def _leaving(sends, owners, starts, ends, splits, ranks, experts, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    inside = rank < ranks
    rows = tl.load(sends + expert * ranks + rank, mask=inside, other=0)
    owner = tl.load(owners + expert)
    own = owner == rank
    # Rows of earlier experts; for each rank all rows, and those of experts with an earlier slot there; and the number
    # of those experts.
    first = tl.sum(rows, 0) * 0
    total = rows * 0
    before = rows * 0
    place = rows * 0
    for least in range(0, experts, BLOCK):
        other = least + tl.arange(0, BLOCK)
        there = other < experts
        rows_of = tl.load(
            sends + other[:, None] * ranks + rank[None, :], mask=there[:, None] & inside[None, :], other=0
        )
        first += tl.sum(tl.sum(tl.where((other < expert)[:, None], rows_of, 0), 1), 0)
        total += tl.sum(rows_of, 0)
        theirs = tl.load(owners + other, mask=there, other=0)
        earlier = (theirs < owner) | ((theirs == owner) & (other < expert))
        their_own = theirs[:, None] == rank[None, :]
        sooner = there[:, None] & tl.where(their_own == own[None, :], earlier[:, None], their_own)
        before += tl.sum(tl.where(sooner, rows_of, 0), 0)
        place += tl.sum(sooner.to(tl.int32), 0)
    at = rank * experts + place
    tl.store(starts + at, first + tl.cumsum(rows, 0) - rows, mask=inside)
    tl.store(ends + at, tl.cumsum(total, 0) - total + before + rows, mask=inside)
    if expert == 0:
        tl.store(splits + rank, total, mask=inside)


@tuned(CONFIGS, key=[], varying=["ranks", "experts", "held"])
def _arriving(
    receives, slots, starts, ends, offsets, splits, ranks, experts, held, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    inside = rank < ranks
    expert = tl.load(slots + slot)
    rows = tl.load(receives + rank * experts + expert, mask=inside, other=0)
    # For each rank: all rows from it, and those for earlier slots.
    total = rows * 0
    before = rows * 0
    for least in range(0, held, BLOCK):
        other = least + tl.arange(0, BLOCK)
        there = other < held
        which = tl.load(slots + other, mask=there, other=0)
        rows_of = tl.load(
            receives + rank[None, :] * experts + which[:, None], mask=there[:, None] & inside[None, :], other=0
        )
        total += tl.sum(rows_of, 0)
        before += tl.sum(tl.where((other < slot)[:, None], rows_of, 0), 0)
    begin = tl.sum(before, 0)
    at = slot * ranks + rank
    tl.store(starts + at, tl.cumsum(total, 0) - total + before, mask=inside)
    tl.store(ends + at, begin + tl.cumsum(rows, 0), mask=inside)
    tl.store(offsets + slot, (begin + tl.sum(rows, 0)).to(tl.int32))
    if slot == 0:
        tl.store(splits + ranks + rank, total, mask=inside)
