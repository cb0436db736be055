"""From quotas to what is sent where: the plan of one token exchange.

Pure functions on integers, no communication. Rows arrive sorted by expert; they leave ordered by
(destination, slot), and at the destination they are brought into the order (slot, source).

A rank's slots are its own experts and its replicas, ordered by (owner, expert): the order in which experts
come from their owners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Quotas


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


def slots_of(placement: Placement, rank: int) -> Ints:
    """The experts that ``rank`` holds, in slot order: int64 ``[S]``."""
    experts, ranks = placement.pairs
    held = experts[ranks == rank]
    return held[np.argsort(placement.owner_array[held], kind="stable")]


def on_device(index: Ints, device: torch.device) -> torch.Tensor:
    """An index as a tensor on ``device``, without waiting for what the device does meanwhile."""
    tensor = torch.from_numpy(index)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def join_segments(starts: Ints, lengths: Ints) -> Ints:
    """Concatenate the ranges ``[start, start + length)``: int64 ``[n], [n] -> [sum(lengths)]``."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def make_ticket(quotas: Quotas, placement: Placement, rank: int, device: torch.device) -> Ticket:
    """What one rank sends and receives.

    Args:
        quotas: this rank's part: which of its rows go where, and which arrive.
    """
    # Step 1: what this rank sends. A segment is the rows of one expert that go to one rank; the first rows of an
    # expert go to the lowest rank. Together the segments are all rows, in order.
    experts, destinations = np.nonzero(quotas.sends)
    lengths = quotas.sends[experts, destinations]
    order = np.lexsort((experts, placement.owner_array[experts], destinations))
    send_index = join_segments((np.cumsum(lengths) - lengths)[order], lengths[order])
    sent = np.bincount(destinations, lengths, minlength=len(quotas.receives)).astype(np.int64)

    # Step 2: what it receives, [W, S] rows of each source for each slot.
    arriving = quotas.receives[:, slots_of(placement, rank)]
    flat = arriving.reshape(-1)
    arrival = (np.cumsum(flat) - flat).reshape(arriving.shape)

    # Step 3: from (source, slot) order to (slot, source) order.
    receive_index = join_segments(arrival.T.reshape(-1), arriving.T.reshape(-1))
    return Ticket(
        slot_offsets=on_device(np.cumsum(arriving.sum(0)).astype(np.int32), device),
        splits=torch.from_numpy(np.stack([sent, arriving.sum(1)])),
        send_index=on_device(send_index, device),
        receive_index=on_device(receive_index, device),
    )
