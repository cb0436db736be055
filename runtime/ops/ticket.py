"""From quotas to what is sent where: the plan of one token exchange.

Pure functions on integers, no communication. Rows arrive sorted by expert; they leave ordered by
(destination, slot), and at the destination they are brought into the order (slot, source).

The rows of a layer may travel in several chunks, each with a ticket of its own. What one rank sends to one slot is
cut into parts of equal length, so each chunk has its share of every slot's rows and of every link's.

A rank's slots are its own experts, by number, and behind them its replicas by (owner, expert): the order in which
they come from their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hecate.runtime.comm.collectives import on_device
from hecate.runtime.kernels.expand_segments import expand_segments
from hecate.runtime.kernels.launch import runs_on
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Quotas

# Of an exchange: the ends of the slots' rows, splits, send index, receive index.
TICKET_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One exchange, seen from one rank; the same ticket carries rows there, back, and their gradients.

    Attributes:
        slot_offsets: end of each slot's rows after the exchange, int32 ``[S]`` on the device.
        splits: rows to (line 0) and from (line 1) each rank, int64 ``[2, W]`` on the CPU.
        send_index: which row goes at each position of the send buffer, int64 on the device.
        receive_index: which received row goes at each position of the slot order, int64 ``[R']`` on the device.
    """

    slot_offsets: torch.Tensor
    splits: torch.Tensor
    send_index: torch.Tensor
    receive_index: torch.Tensor


def join_segments(starts: Ints, lengths: Ints) -> Ints:
    """Concatenate the ranges ``[start, start + length)``: int64 ``[n], [n] -> [sum(lengths)]``."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def join_on_device(ranges: Sequence[tuple[Ints, Ints]], device: torch.device) -> list[torch.Tensor]:
    """:func:`join_segments` of each pair of starts and lengths, on ``device``.

    Where kernels run, only starts and ends go there, in one copy, and the numbers are written there.
    """
    if not runs_on(device):
        return [on_device(join_segments(starts, lengths), device) for starts, lengths in ranges]
    ends = [np.cumsum(lengths) for _, lengths in ranges]
    tables = [part for (starts, _), end in zip(ranges, ends, strict=True) for part in (starts, end)]
    moved = iter(on_device(np.concatenate(tables), device).split([len(table) for table in tables]))
    totals = [int(end[-1]) if len(end) else 0 for end in ends]
    return [expand_segments(starts, end, total) for starts, end, total in zip(moved, moved, totals, strict=True)]


def _cut(lengths: Ints, experts: Ints, chunk: int, chunks: int) -> tuple[Ints, Ints]:
    """Begin and length of one chunk's part of each segment; sender and receiver cut alike.

    What does not divide goes to another chunk for each expert, so that chunks stay even where segments are short.
    """
    begin, end = ((lengths * c + experts % chunks) // chunks for c in (chunk, chunk + 1))
    return begin, end - begin


def make_ticket(
    quotas: Quotas, placement: Placement, rank: int, device: torch.device, *, chunk: int = 0, chunks: int = 1
) -> Ticket:
    """What one rank sends and receives.

    Args:
        quotas: this rank's part: which of its rows go where, and which arrive.
        chunk: which of ``chunks`` parts of these rows.
    """
    # Step 1: what this rank sends. A segment is the rows of one expert that go to one rank; the first rows of an
    # expert go to the lowest rank. Together the segments are all rows, in order.
    experts, destinations = np.nonzero(quotas.sends)
    whole = quotas.sends[experts, destinations]
    begin, lengths = _cut(whole, experts, chunk, chunks)
    owners = placement.owner_array[experts]
    order = np.lexsort((experts, owners, owners != destinations, destinations))
    leaving = (np.cumsum(whole) - whole + begin)[order], lengths[order]
    sent = np.bincount(destinations, lengths, minlength=len(quotas.receives)).astype(np.int64)

    # Step 2: what it receives, [W, S] rows of each source for each slot.
    slots = placement.slots_on(rank)
    _, arriving = _cut(quotas.receives[:, slots], slots, chunk, chunks)
    flat = arriving.reshape(-1)
    arrival = (np.cumsum(flat) - flat).reshape(arriving.shape)

    # Step 3: from (source, slot) order to (slot, source) order.
    in_slots = arrival.T.reshape(-1), arriving.T.reshape(-1)
    send_index, receive_index = join_on_device([leaving, in_slots], device)
    return Ticket(
        slot_offsets=on_device(np.cumsum(arriving.sum(0)).astype(np.int32), device),
        splits=torch.from_numpy(np.stack([sent, arriving.sum(1)])),
        send_index=send_index,
        receive_index=receive_index,
    )
