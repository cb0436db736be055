"""Plans of token exchanges, from quotas to which row is sent where: pure functions on integers.

Rows arrive sorted by expert; they leave ordered by (destination, slot), and at the destination they are brought into
the order (slot, source). A rank's slots are its own experts, by number, and behind them its replicas by (owner,
expert). Rows may travel in several chunks, each with its own ticket and its share of every slot's and link's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm.collectives import on_device, on_device_together
from hecate.runtime.kernels.expand_segments import expand_segments
from hecate.runtime.kernels.launch import runs_on
from hecate.runtime.placement import native
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Quotas

# Parts of an exchange's ticket: the ends of the slots' rows, splits, send index, receive index.
TICKET_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The plan of an exchange, seen from one rank; the same ticket carries rows there, back, and their gradients."""

    slot_offsets: Tensor  # end of each slot's rows after the exchange, int32 ``[S]`` on the device
    splits: Tensor  # rows to (line 0) and from (line 1) each rank, int64 ``[2, W]`` on the CPU
    send_index: Tensor  # which row goes at each position of the send buffer, int64 on the device
    # Which received row goes at each position of the slot order, int64 ``[R']`` on the device.
    receive_index: Tensor


def join_segments(starts: Ints, lengths: Ints) -> Ints:
    """Concatenate the ranges ``[start, start + length)``: int64 ``[n], [n] -> [sum(lengths)]``."""
    return native.join_segments(starts, lengths, int(lengths.sum()))


def join_on_device(ranges: Sequence[tuple[Ints, Ints]], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Join the segments of each pair of starts and lengths on ``device``, and return where each of them ends, too."""
    ends = [np.cumsum(lengths) for _, lengths in ranges]
    totals = [int(end[-1]) if len(end) else 0 for end in ends]
    if not runs_on(device):
        return [
            (on_device(native.join_segments(starts, lengths, total), device), on_device(end, device))
            for (starts, lengths), end, total in zip(ranges, ends, totals, strict=True)
        ]
    # Where kernels run, only starts and ends are copied there, once, and kernels write the numbers.
    tables = [table for (starts, _), end in zip(ranges, ends, strict=True) for table in (starts, end)]
    moved = on_device_together(tables, device)
    return [
        (expand_segments(starts, end, total), end)
        for starts, end, total in zip(moved[::2], moved[1::2], totals, strict=True)
    ]


def _cut(lengths: Ints, experts: Ints, chunk: int, chunks: int) -> tuple[Ints, Ints]:
    """Return begin and length of one chunk's part of each segment; sender and receiver cut alike."""
    if chunks == 1:
        return np.zeros_like(lengths), lengths
    # Each expert's remainder goes to another chunk, so that chunks stay even where segments are short.
    begin, end = ((lengths * c + experts % chunks) // chunks for c in (chunk, chunk + 1))
    return begin, end - begin


def make_tickets(
    quotas: Quotas, placement: Placement, rank: int, device: torch.device, chunks: int = 1
) -> list[Ticket]:
    """Plan the rows that one rank sends and receives, from its ``quotas``, in ``chunks`` chunks."""
    # Step 1: rows that leave. A segment is the rows of one expert that go to one rank; the first rows of an
    # expert go to the lowest rank. Together the segments are all rows, in order.
    experts, destinations = placement.pairs
    whole, order = quotas.sent, placement.leaving
    first = np.cumsum(whole) - whole

    # Step 2: the rows that it receives, [W, S] rows of each source for each slot.
    slots = placement.slots_on(rank)
    received = quotas.received.T

    # Step 3: each chunk's part of the rows that leave, and for those that arrive in (source, slot) order the
    # segments in (slot, source) order.
    ranges, splits = [], []
    for chunk in range(chunks):
        begin, leaving = _cut(whole, experts, chunk, chunks)
        _, arriving = _cut(received, slots, chunk, chunks)
        arrival = (np.cumsum(arriving) - arriving.reshape(-1)).reshape(arriving.shape)
        ranges += [((first + begin)[order], leaving[order]), (arrival.T.reshape(-1), arriving.T.reshape(-1))]
        sent = np.bincount(destinations, leaving, minlength=len(received)).astype(np.int64)
        splits.append(torch.from_numpy(np.stack([sent, arriving.sum(1)])))

    # Step 4: all of it on the device.
    joined = join_on_device(ranges, device)
    return [
        Ticket(
            slot_offsets=ends[len(received) - 1 :: len(received)].to(torch.int32),
            splits=split,
            send_index=send_index,
            receive_index=receive_index,
        )
        for split, (send_index, _), (receive_index, ends) in zip(splits, joined[::2], joined[1::2], strict=True)
    ]
