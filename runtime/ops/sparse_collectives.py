"""SparseAllGather and SparseReduceScatter: experts to their replicas, and gradients back (paper, section 2).

All tensors of an expert travel together, as one row of one ``all_to_all_single`` per stage and dtype. With several
nodes there are two stages. The bytes sent are the number of replicas times the bytes of an expert: O(lambda S) of the
paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.collectives import on_device, on_device_together
from hecate.runtime.comm.world import World
from hecate.runtime.kernels.pack_experts import pack_experts, unpack_experts, widths_of
from hecate.runtime.kernels.sum_replicas import sum_replicas
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Parts, Stage, StageOfRank, Travels, places_of


@dataclass(frozen=True, eq=False)
class Coming:
    """A stage in which experts come to their replicas."""

    stage: StageOfRank  # on the host; at hand are copies of own experts that leave, and behind them replicas
    leave: Tensor  # of the experts at hand those that go out, int64 ``[n]``
    arrive: Tensor  # replicas that come in, int64 ``[m]``
    in_first: int  # how many of those that go out are own experts


@dataclass(frozen=True, eq=False)
class Returning:
    """A stage in which gradients return to the owners."""

    stage: StageOfRank
    parts: Parts
    leave: Tensor  # replicas whose gradients go out, int64 ``[m]``
    # As in :class:`Parts`.
    passed_on: Tensor
    totals: Tensor
    order: Tensor
    begins: Tensor


@dataclass(frozen=True, eq=False)
class ReplicaTables:
    """Tables of one rank, parts of one tensor on its device. Stages in which no rank sends anything are left out."""

    places: Tensor  # own experts that leave, int64 ``[L]``
    coming: list[Coming]
    returning: list[Returning]  # in the order in which gradients travel; empty where none will
    summed: Tensor  # slots that get parts of gradients, int64 ``[P]``
    home: int  # how many of them are own experts; these come first

    @classmethod
    def of(cls, travels: Travels, device: torch.device, *, homeward: bool) -> ReplicaTables:
        """Return the tables on ``device``, without waiting for it; ``homeward`` if gradients will return."""
        leaving, owned = len(travels.leaving), travels.placement.owners.counts[travels.rank]
        there = [mine for stage, mine in zip(travels.stages, travels.there, strict=True) if len(stage.experts)]
        back = (
            [
                (mine, parts)
                for stage, mine, parts in reversed([*zip(travels.stages, travels.slots, travels.parts, strict=True)])
                if len(stage.experts)
            ]
            if homeward
            else []
        )
        summed = travels.summed if homeward else travels.places[:0]
        numbers = [travels.places, summed]
        for mine in there:
            numbers += [mine.leave, mine.arrive - leaving]
        for mine, parts in back:
            numbers += [mine.arrive - owned, parts.passed_on, parts.totals, parts.order, parts.begins]
        tables = iter(on_device_together(numbers, device))
        return cls(
            places=next(tables),
            summed=next(tables),
            coming=[Coming(mine, next(tables), next(tables), int((mine.leave < leaving).sum())) for mine in there],
            returning=[Returning(mine, parts, *(next(tables) for _ in range(5))) for mine, parts in back],
            home=int((summed < owned).sum()),
        )


def tables_of(travels: Travels, device: torch.device, *, homeward: bool = True) -> ReplicaTables:
    """Return :meth:`ReplicaTables.of`, made once for all steps in which replicas travel so."""
    if (known := _KNOWN.get(travels)) is None:
        known = _KNOWN[travels] = ReplicaTables.of(travels, device, homeward=homeward)
    return known


_KNOWN: WeakKeyDictionary[Travels, ReplicaTables] = WeakKeyDictionary()


def gather(
    shards: Sequence[Tensor],
    travels: Travels,
    world: World,
    *,
    before: Placement | None = None,
    have: Sequence[Tensor] = (),
) -> Callable[[], list[Tensor]]:
    """Copy own experts ``[E_r, ...]`` that leave, and return a function that fills replicas (SparseAllGather).

    They are ``[K, ...]``, one for each tensor of the layer. Those that the placement ``before`` had are copied from
    ``have``, and do not travel (:func:`missing_travels`).
    """
    # Gradients of replicas that are added return the way of the whole placement.
    tables = tables_of(travels, shards[0].device, homeward=before is None)
    replicas = [shard.new_empty((len(travels.replicas), *shard.shape[1:])) for shard in shards]
    copies = [shard.index_select(0, tables.places) for shard in shards]
    if before is not None:
        where = places_of(before.replicas_on(travels.rank), travels.replicas, before.owners.num_experts)
        there = on_device(where, shards[0].device)
        for out, tensor in zip(replicas, have, strict=True):
            out.index_copy_(0, there, tensor)

    def run() -> list[Tensor]:
        for stage in tables.coming:
            _forward(copies, replicas, stage, world)
        return replicas

    return run


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


def scatter(
    own: Sequence[Tensor], replicas: Sequence[Tensor], travels: Travels, world: World
) -> Callable[[], list[Tensor]]:
    """Copy gradients, and return a function that brings their mean over ranks to the owners (SparseReduceScatter).

    They are of own experts ``[E_r, ...]`` and replicas ``[K, ...]``, whose tensors may be freed then. A rank adds the
    parts of others to its own gradient, in rank order: first in each node, then at the owner. So one placement has
    one order of sums. A gradient for which no parts come stays in its dtype.
    """
    tables, groups = tables_of(travels, own[0].device), by_dtype([grad.dtype for grad in own])
    means = [torch.div(grad, world.size, out=room_like(grad)) for grad in own]
    # Gradients of the slots that get parts to add up in, ``[P, width]``.
    sums = [
        pack_experts([first], tables.summed, behind=[second], dtype=sum_dtype(first.dtype), in_first=tables.home)
        for first, second in zip(own, replicas, strict=True)
    ]
    # Of each stage, gradients of replicas that leave, ``[n, width]``, one for each dtype.
    packed = [
        [pack_experts([replicas[place] for place in group], stage.leave) for group in groups]
        for stage in tables.returning
    ]

    def run() -> list[Tensor]:
        for stage, leaving in zip(tables.returning, packed, strict=True):
            _backward([[sums[place] for place in group] for group in groups], stage, leaving, world)
        return with_sums(means, sums, tables.summed[: tables.home], world.size)

    return run


def with_sums(means: list[Tensor], sums: Sequence[Tensor], slots: Tensor, ranks: int) -> list[Tensor]:
    """Write the first of ``sums`` ``[P, width]``, divided by the number of ranks, over ``slots`` of ``means``."""
    count = len(slots)
    if count > 0:
        for mean, total in zip(means, sums, strict=True):
            mean.index_copy_(0, slots, (total[:count] / ranks).to(mean.dtype).view(count, *mean.shape[1:]))
    return means


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are added up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _forward(copies: list[Tensor], replicas: list[Tensor], tables: Coming, world: World) -> None:
    """Send experts on: copies of own ones, and replicas that have come, into replicas of others."""
    stage = tables.stage
    for group in by_dtype([tensor.dtype for tensor in replicas]):
        leaving, tensors = ([of_layer[index] for index in group] for of_layer in (copies, replicas))
        packed = pack_experts(leaving, tables.leave, behind=tensors, in_first=tables.in_first)
        received = collectives.all_to_all(packed, stage.send, stage.receive, world)
        unpack_experts(received, tensors, tables.arrive)


def _backward(sums: list[list[Tensor]], tables: Returning, packed: list[Tensor], world: World) -> None:
    """Return gradients the way the experts came, and add them up where they came from, dtype by dtype."""
    stage, parts = tables.stage, tables.parts
    for totals, leaving in zip(sums, packed, strict=True):
        if len(parts.passed_on):
            leaving.index_copy_(0, tables.passed_on, pack_experts(totals, tables.totals, dtype=leaving.dtype))
        received = collectives.all_to_all(leaving, stage.receive, stage.send, world)
        for total, part in zip(totals, received.split(widths_of(totals), dim=1), strict=True):
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
