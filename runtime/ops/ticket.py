"""Tickets of token exchanges: which row is sent where, on the device.

A rank's slots are its own experts, by number, and behind them its replicas by (owner, expert). Rows may travel in
several chunks, each with its own ticket (``planner/segments.py`` says in which order).
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


def make_tickets(quotas: Quotas, device: torch.device, chunks: int = 1) -> list[Ticket]:
    """Plan the rows that one rank sends and receives, from its ``quotas``, in ``chunks`` chunks."""
    parts = [native.segments_of(quotas, chunk, chunks) for chunk in range(chunks)]
    joined = join_on_device([ranges for part in parts for ranges in (part.leaving, part.arriving)], device)
    world_size = quotas.placement.owners.world_size
    return [
        Ticket(
            slot_offsets=ends[world_size - 1 :: world_size].to(torch.int32),
            splits=torch.from_numpy(part.splits),
            send_index=send_index,
            receive_index=receive_index,
        )
        for part, (send_index, _), (receive_index, ends) in zip(parts, joined[::2], joined[1::2], strict=True)
    ]
