"""Dispatch on the device, from counts to an exchange's ticket; rows are split as ``assign_tokens`` does it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hecate.runtime.comm.collectives import on_device
from hecate.runtime.kernels.expand_segments import expand_segments
from hecate.runtime.one_sided.balance_rows import balance_rows
from hecate.runtime.one_sided.split_rows import split_rows
from hecate.runtime.one_sided.ticket_segments import ticket_segments
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner.balance import PARTS_BITS, local_ends
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceTables:
    """A placement, as one rank's device reads it; made once for each placement.

    After the E experts there may be some that do not exist, to which no rows go. They stand where tables have more
    room than the placement takes, the first in ``slots``, and as many as it takes in ``replicated``.

    Attributes:
        owners: of each expert, int64 ``[E]``.
        slots: the experts that the rank holds, in slot order, int64 ``[S]``.
        replicated: experts with more than one holder, ascending, int64 ``[n]``.
        parts: where each rank's part of each of them begins and ends before levels even out, int64 ``[n, W + 1]``.
        order, nodes: the ranks, node by node, and the node of each of them, int64 ``[W]``.
    """

    rank: int
    owners: torch.Tensor
    slots: torch.Tensor
    replicated: torch.Tensor
    parts: torch.Tensor
    order: torch.Tensor
    nodes: torch.Tensor

    @classmethod
    def from_placement(
        cls,
        placement: Placement,
        topology: Topology,
        rank: int,
        device: torch.device,
        *,
        replicas: int = 0,
        replicated: int = 0,
    ) -> DeviceTables:
        """Return the tables on ``device`` without waiting for it, with room for so many replicas and replicated ones.

        By default (0) there is room for as many as there are.
        """
        order, experts = np.argsort(topology.position), len(placement.holders)
        copied = [expert for expert, ranks in enumerate(placement.holders) if len(ranks) > 1]
        slots, parts = placement.slots_on(rank), _parts(placement, topology, copied)
        vacant = max(0, placement.owners.counts[rank] + replicas - len(slots))
        lines = max(0, replicated - len(copied))
        # There are as many of them for all placements with this room. Rank 0 owns them, alone.
        nobody = np.arange(experts, experts + max(replicated, min(replicas, 1)))
        whole = np.tile(np.minimum(np.arange(topology.world_size + 1), 1) << PARTS_BITS, (lines, 1))
        return cls(
            rank=rank,
            owners=on_device(np.concatenate([placement.owner_array, np.zeros_like(nobody)]), device),
            slots=on_device(np.pad(slots, (0, vacant), constant_values=experts), device),
            replicated=on_device(np.array([*copied, *nobody[:lines]], dtype=np.int64), device),
            parts=on_device(np.concatenate([parts, whole]), device),
            order=on_device(order, device),
            nodes=on_device(topology.nodes[order], device),
        )


def _parts(placement: Placement, topology: Topology, replicated: list[int]) -> Ints:
    """Return where each rank's part of each expert ends; a rank that does not hold it has an empty part."""
    ends = np.zeros((len(replicated), topology.world_size + 1), dtype=np.int64)
    for line, expert in zip(ends, replicated, strict=True):
        ranks = placement.holders[expert]
        line[np.asarray(ranks) + 1] = local_ends(ranks, topology)
    running: Ints = np.maximum.accumulate(ends, axis=1)
    return running


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundedTicket:
    """A ticket on the device, with a bound of the rows that come: the exchange is made whole, or not at all.

    Attributes:
        slot_offsets: end of each slot's rows after the exchange, int32 ``[S]``, none beyond the room.
        splits: rows to (line 0) and from (line 1) each rank, and rows for which each rank has no room (line 2, equal
            on all ranks), int64 ``[3, W]``. Unless line 2 is zero, lines 0 and 1 are: nothing travels.
        send_index: which row goes at each position of the send buffer, int64 ``[rows]``.
        receive_index: which received row goes at each position of the slot order, int64 ``[room]``. After those that
            come it names none that travels, so rows may be scattered by it.
    """

    slot_offsets: torch.Tensor
    splits: torch.Tensor
    send_index: torch.Tensor
    receive_index: torch.Tensor


def bounded_ticket(counts: torch.Tensor, tables: DeviceTables, *, rows: int, percent: int) -> BoundedTicket:
    """Return the ticket for ``counts``, int64 ``[W, E]``, empty unless every rank has room for its rows.

    A rank has room for ``percent`` of its own ``rows``. All ranks know all counts, so none begins an exchange that
    another refuses.
    """
    counts = torch.nn.functional.pad(counts, (0, len(tables.owners) - counts.shape[1]))
    wanted, sends, receives = device_quotas(counts, tables)
    # A rank's rows for experts are at most all its rows, so the bound is at most the room.
    excess = (wanted.sum(0) - counts.sum(1) * percent // 100).clamp_min(0)
    room = room_for(rows, percent)
    found = ticket_segments(sends, receives, tables.owners, tables.slots)
    if len(tables.slots) > 0:
        arriving = expand_segments(found.receive_starts, found.receive_ends, room)
        places = torch.arange(room, dtype=torch.int64, device=counts.device)
        receive_index = torch.where(places < found.receive_ends[-1], arriving, room)
    else:
        # Nothing comes.
        receive_index = counts.new_full((room,), room)
    return BoundedTicket(
        slot_offsets=found.slot_offsets.clamp_max(room),
        splits=torch.cat([found.splits * (excess.amax() == 0), excess.unsqueeze(0)]),
        send_index=expand_segments(found.send_starts, found.send_ends, rows),
        receive_index=receive_index,
    )


def room_for(rows: int, percent: int) -> int:
    """Return how many rows may come to a rank that has ``rows`` itself, which may be a symbol."""
    return rows * percent // 100


def device_quotas(counts: torch.Tensor, tables: DeviceTables) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the planner's ``Quotas`` on the device, from ``counts``, int64 ``[W, E]``, fewer than 2**31 together.

    They are rows of each expert that each rank computes, and that this rank sends to each, both int64 ``[E, W]``, and
    rows from each rank of each expert, int64 ``[W, E]``.
    """
    wanted = balance_rows(counts, tables.owners, tables.replicated, tables.parts)
    return wanted, *split_rows(counts, wanted, tables.order, tables.nodes, tables.rank)
