"""SparseAllGather and SparseReduceScatter: experts to their replicas, and gradients back (paper, section 2).

All tensors of an expert travel together, as one row of one ``all_to_all_single`` per stage and dtype. With several
nodes there are two stages. The bytes sent are the number of replicas times the bytes of an expert: O(lambda S) of the
paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.collectives import on_device
from hecate.runtime.comm.world import World
from hecate.runtime.kernels.pack_experts import pack_experts, unpack_experts, widths_of
from hecate.runtime.kernels.sum_replicas import sum_replicas
from hecate.runtime.ops.replica_tables import Coming, ReplicaTables, Returning, tables_of
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Stage, Travels, places_of


@dataclass(frozen=True)
class Replicas:
    """This rank's replicas while they come, and the experts that it sends to others meanwhile."""

    travels: Travels
    tables: ReplicaTables
    tensors: list[Tensor]  # ``[K, ...]``, one for each tensor of the layer
    copies: list[Tensor]  # of own experts that others want, ``[L, ...]``


def new_replicas(shards: Sequence[Tensor], travels: Travels, *, homeward: bool = True) -> Replicas:
    """Allocate a rank's replicas, and copy those of its own experts ``[E_r, ...]`` that leave.

    With ``homeward`` their gradients will return the same way.
    """
    tables, count = tables_of(travels, shards[0].device, homeward=homeward), len(travels.replicas)
    return Replicas(
        travels=travels,
        tables=tables,
        tensors=[shard.new_empty((count, *shard.shape[1:])) for shard in shards],
        copies=[shard.index_select(0, tables.places) for shard in shards],
    )


def gather(replicas: Replicas, world: World) -> list[Tensor]:
    """Fill the replicas: SparseAllGather."""
    for stage in replicas.tables.coming:
        _forward(replicas, stage, world)
    return replicas.tensors


def take_over(replicas: Replicas, have: Sequence[Tensor], before: Placement, rank: int) -> None:
    """Copy the replicas ``have`` of an earlier, smaller placement."""
    where = places_of(before.replicas_on(rank), replicas.travels.replicas, before.owners.num_experts)
    there = on_device(where, replicas.tensors[0].device)
    for out, tensor in zip(replicas.tensors, have, strict=True):
        out.index_copy_(0, there, tensor)


def missing_travels(travels: Travels, before: Placement) -> Travels:
    """Return the travels of the replicas that the placement ``before`` did not have.

    A rank that passes an expert on has it by then: from before, or from the first stage.
    """
    held = before.matrix > 0
    first, second = (
        Stage(experts=s.experts[new], sources=s.sources[new], destinations=s.destinations[new])
        for s in travels.stages
        for new in (~held[s.experts, s.destinations],)
    )
    return replace(travels, stages=(first, second))


def bytes_leaving(travels: Travels, tensors: Sequence[Tensor], *, homeward: bool = False) -> int:
    """Return the bytes of experts ``[E_r, ...]``, or ``homeward`` of gradients, that a rank sends in all stages."""
    expert = sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors)
    return expert * travels.experts_sent(homeward=homeward)


@dataclass(frozen=True)
class Gradients:
    """Gradients of this rank's slots on their way to the owners."""

    tables: ReplicaTables
    # Of own experts, divided by W: ``[E_r, ...]``, one for each tensor of the layer. Where others have parts of a
    # gradient, they come from the sums at the end.
    means: list[Tensor]
    # Gradients of the slots that get parts to add up in, ``[P, width]``, one for each tensor; float32 for narrower
    # dtypes.
    sums: list[Tensor]
    # Of each stage, gradients of replicas that leave, ``[n, width]``, one for each dtype.
    packed: list[list[Tensor]]


def new_gradients(own: Sequence[Tensor], replicas: Sequence[Tensor], travels: Travels, world: World) -> Gradients:
    """Copy gradients of own experts ``[E_r, ...]`` and replicas ``[K, ...]``, so that their tensors may be freed.

    A gradient for which no parts come stays in its dtype.
    """
    tables, groups = tables_of(travels, own[0].device), by_dtype([grad.dtype for grad in own])
    return Gradients(
        tables=tables,
        means=[torch.div(grad, world.size, out=room_like(grad)) for grad in own],
        sums=[
            pack_experts(
                [first],
                tables.summed,
                behind=[second],
                dtype=sum_dtype(first.dtype),
                in_first=tables.home,
                ascending=True,
            )
            for first, second in zip(own, replicas, strict=True)
        ],
        packed=[
            [pack_experts([replicas[place] for place in group], stage.leave) for group in groups]
            for stage in tables.returning
        ],
    )


def scatter(gradients: Gradients, world: World) -> list[Tensor]:
    """Bring the mean over ranks of the slots' gradients to the owners (SparseReduceScatter): ``[E_r, ...]``.

    A rank adds the parts of others to its own gradient, in rank order: first in each node, then at the owner. So one
    placement has one order of sums. ``gradients`` are overwritten.
    """
    for stage, packed in zip(gradients.tables.returning, gradients.packed, strict=True):
        _backward(gradients, stage, packed, world)
    means = gradients.means
    if home := gradients.tables.home:
        rows = gradients.tables.summed[:home]
        for mean, total in zip(means, gradients.sums, strict=True):
            mean.index_copy_(0, rows, (total[:home] / world.size).to(mean.dtype).view(home, *mean.shape[1:]))
    return means


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are added up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _forward(replicas: Replicas, tables: Coming, world: World) -> None:
    """Send experts on: this rank's own ones, and replicas that have come, into replicas of others."""
    stage = tables.stage
    for group in by_dtype([tensor.dtype for tensor in replicas.tensors]):
        tensors = [replicas.tensors[index] for index in group]
        copies = [replicas.copies[index] for index in group]
        packed = pack_experts(copies, tables.leave, behind=tensors, in_first=tables.in_first)
        received = collectives.all_to_all(packed, stage.send, stage.receive, world)
        unpack_experts(received, tensors, tables.arrive)


def _backward(gradients: Gradients, tables: Returning, packed: list[Tensor], world: World) -> None:
    """Return gradients the way the experts came, and add them up where they came from."""
    stage, parts = tables.stage, tables.parts
    groups = by_dtype([mean.dtype for mean in gradients.means])
    for group, leaving in zip(groups, packed, strict=True):
        sums = [gradients.sums[place] for place in group]
        if len(parts.passed_on):
            leaving.index_copy_(0, tables.passed_on, pack_experts(sums, tables.totals, dtype=leaving.dtype))
        received = collectives.all_to_all(leaving, stage.receive, stage.send, world)
        for total, part in zip(sums, received.split(widths_of(sums), dim=1), strict=True):
            # Parts come ordered by rank, and a slot's keep that order.
            sum_replicas(total, part, tables.begins, tables.order, parts.rounds)


def by_dtype(dtypes: Sequence[torch.dtype]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        groups.setdefault(dtype, []).append(index)
    return list(groups.values())


def room_like(tensor: Tensor) -> Tensor:
    """Allocate contiguous memory for a gradient, whatever its own layout."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
