"""From expert counts to what is sent where: the plan of one token exchange.

Pure functions on tensors, no communication. Rows arrive sorted by expert; they leave ordered by
(destination, slot), and at the destination they are brought into the order (slot, source).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hecate.runtime.owners import Owners


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


def join_segments(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Concatenate the ranges ``[start, start + length)``: int64 ``[n], [n] -> [sum(lengths)]``."""
    total = int(lengths.sum())
    before = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts - before, lengths, output_size=total)
    return shift + torch.arange(total, dtype=torch.int64)


def plan_owned(counts: torch.Tensor, owners: Owners, rank: int, device: torch.device) -> Ticket:
    """Every row goes to the owner of its expert.

    Args:
        counts: rows that each rank routed to each expert, int64 ``[W, E]`` on the CPU.
    """
    # Step 1: what this rank sends, experts taken in the order (owner, slot).
    mine = counts[rank]
    starts = mine.cumsum(0) - mine
    send_index = join_segments(starts[owners.by_rank], mine[owners.by_rank])
    sent = torch.zeros(owners.world_size, dtype=torch.int64)
    sent.index_add_(0, torch.tensor(owners.ranks, dtype=torch.int64), mine)

    # Step 2: what it receives, [W, S] rows of each source for each slot.
    arriving = counts[:, owners.owned_by(rank)]
    flat = arriving.reshape(-1)
    arrival = (flat.cumsum(0) - flat).view_as(arriving)

    # Step 3: from (source, slot) order to (slot, source) order.
    receive_index = join_segments(arrival.t().reshape(-1), arriving.t().reshape(-1))
    return Ticket(
        slot_offsets=arriving.sum(0).cumsum(0).to(torch.int32).to(device),
        splits=torch.stack([sent, arriving.sum(1)]),
        send_index=send_index.to(device),
        receive_index=receive_index.to(device),
    )
