"""The ranks of one model in groups: who shares its experts with whom, and who has the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hecate.runtime.comm.agreement import gather_json
from hecate.runtime.comm.start import end_with_agent
from hecate.runtime.comm.world import World, be_current, find_world, world_among, world_of


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of one model by what they share.

    What is sharded is sharded in the group, and averaged over twins; what is whole is averaged over everyone;
    DTensors, as tensor parallelism makes them, are averaged over the ranks with the same part.

    Attributes:
        everyone: the ranks that train the model. They agree on its graphs, its options and its steps, average the
            gradients of what each of them has whole, and write one checkpoint.
        group: those of them between whom experts and dense rows are sharded. Routed tokens, counts and replicas
            travel between these, and placements and owners are of these. Everyone, where there is one group.
        twins: the ranks with this one's place in each group: they own the same experts and rows, equal to the last
            bit, and average the gradients of these. This rank alone, where there is one group.
        batch: the ranks with other parts of the batch, and with the same part of each DTensor. Everyone, where
            there are none.
        copies: numbers among everyone of the ranks between which DTensors are split, this one with them. They compute
            the same of one batch, each in another group. Nobody, where there are none.
    """

    everyone: World
    group: World
    twins: World
    batch: World
    copies: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of the group's ranks among everyone."""
        return self.group.numbers or tuple(range(self.group.size))

    @property
    def groups(self) -> int:
        return self.twins.size


def find_mesh(
    mesh: DeviceMesh | None,
    device: torch.device,
    expert_group: int | Literal["auto"] | None = None,
    *,
    experts: int | None = None,
    split: DeviceMesh | None = None,
) -> Mesh:
    """Return the ranks of ``mesh``, or all that torchrun started, or this process alone, in groups.

    Args:
        mesh: of one dimension, or of two: along the second are the ranks of a group.
        expert_group: ranks of a group; None for those of the mesh, or for all; "auto" for :func:`best_group`.
        experts: how many the layer with the fewest has; None if there are none.
        split: of one dimension, between whose ranks the model has split tensors. ``mesh``, if given, crosses it.

    Raises:
        ValueError: the mesh has more dimensions, or ranks do not make whole groups; or as :func:`find_world`.
    """
    if split is not None and split.size() > 1:
        return _beside(split, mesh, device, expert_group, experts)
    if mesh is not None and mesh.ndim == 2:
        table: list[list[int]] = mesh.mesh.tolist()
        if expert_group not in (None, "auto", len(table[0])):
            raise ValueError(
                f"hecate.compile: Config(expert_group={expert_group}) does not fit the mesh, whose second dimension "
                f"has {len(table[0])} ranks. Leave one of the two out"
            )
        if len(table) > 1:
            end_with_agent()
            be_current(device)
            return _grouped(table, (mesh.get_group(1), mesh.get_group(0)), device)
        # Its only row is a group.
        return _flat(world_of(mesh.get_group(1), device, chosen=True))
    everyone = find_world(mesh, device)
    if expert_group == "auto":
        expert_group = best_group(everyone.size, experts)
    if everyone.size == 1 or expert_group in (None, everyone.size):
        return _flat(everyone)
    assert everyone.group is not None and expert_group is not None, "there are several ranks"
    table = _rows(dist.get_process_group_ranks(everyone.group), expert_group)
    return _grouped(table, (everyone.group,), device, everyone)


def _rows(ranks: Sequence[int], size: int) -> list[list[int]]:
    if len(ranks) % size:
        raise ValueError(
            f"hecate.compile: Config(expert_group={size}) does not divide the {len(ranks)} ranks into whole groups"
        )
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _beside(
    split: DeviceMesh,
    mesh: DeviceMesh | None,
    device: torch.device,
    expert_group: int | Literal["auto"] | None,
    experts: int | None,
) -> Mesh:
    """Return the ranks of ``mesh``, or all, and of all that share split tensors with them. A collective."""
    if mesh is None:
        known = find_world(None, device)
    else:
        known = find_mesh(mesh, device, expert_group if mesh.ndim == 2 else None).everyone
    here, told = [dist.get_rank()], [split.mesh.tolist()]
    if known.group is not None:
        here, told = dist.get_process_group_ranks(known.group), gather_json(told[0], known)
    # The ranks of each part of the batch, by part of a tensor.
    lines = sorted({tuple(line) for line in told})
    line_of = {rank: line for line in lines for rank in line}
    ranks = sorted(line_of)
    crossings = {(len(line), len({*line} & {*here})) for line in lines}
    wanted = (split.size(), 1 if mesh is not None else split.size())
    if crossings != {wanted} or len(ranks) != sum(map(len, lines)) or not {*here} <= {*ranks}:
        raise ValueError(
            f"hecate.compile: the model has tensors that are split between ranks {lines}, and is trained on {here}, "
            "which is no table of ranks: parts of tensors along one dimension, parts of the batch along the other. "
            'Split all tensors along mesh["tp"] of mesh = init_device_mesh(kind, (dp, tp), mesh_dim_names=("dp", '
            '"tp")), and give hecate.compile mesh=mesh["dp"], or no mesh'
        )
    if mesh is not None and mesh.ndim == 2:
        rows = mesh.mesh.tolist()
    else:
        size = best_group(len(lines), experts) if expert_group == "auto" else expert_group or len(lines)
        rows = _rows([line[0] for line in lines], size)
    # A row for each group, and for each part of tensors.
    table = [[line_of[rank][part] for rank in row] for row in rows for part in range(split.size())]
    groups = (split.get_group(),) if known.group is None else (known.group, split.get_group())
    found = _grouped(table, groups, device, known if mesh is None else None)
    ranks_of_batch = [line[split.get_local_rank()] for line in lines]
    batch = found.group
    if len(ranks_of_batch) > batch.size:
        batch = _some(ranks_of_batch, ranks, groups, found.everyone, own_queue=False)
    return replace(found, batch=batch, copies=tuple(map(ranks.index, line_of[dist.get_rank()])))


# Ranks of the largest group that is chosen by itself: with more, rows and plans take longer than a group saves.
_LARGEST_GROUP = 64


def best_group(ranks: int, experts: int | None) -> int:
    """Return the ranks of the largest group that is worth it: whole nodes or part of one, an expert for each rank."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return max(
        size
        for size in range(1, min(ranks, _LARGEST_GROUP, experts or ranks) + 1)
        if ranks % size == 0 and (size % local == 0 or local % size == 0)
    )


def _flat(everyone: World) -> Mesh:
    return Mesh(everyone=everyone, group=everyone, twins=_alone(everyone), batch=everyone)


def _alone(everyone: World) -> World:
    """Return the world of this rank alone, as which it is a group of one or has no twins."""
    own = (everyone.rank,)
    return World(
        rank=0, size=1, group=None, device=everyone.device, chosen=True, numbers=own, among=everyone, own_queue=False
    )


def _grouped(
    table: list[list[int]],
    groups: tuple[dist.ProcessGroup, ...],
    device: torch.device,
    everyone: World | None = None,
) -> Mesh:
    """Return a mesh with a group for each row of ranks in ``table``; ``groups`` connect them all. A collective."""
    table = sorted(table)
    # Torch numbers the ranks of a process group in ascending order.
    if any(list(line) != sorted(line) for line in (*table, *zip(*table, strict=True))):
        raise ValueError(f"hecate.compile: the numbers of the mesh's ranks do not ascend: {table}")
    me, size = dist.get_rank(), len(table[0])
    ranks = sorted(rank for row in table for rank in row)
    row = next(row for row in table if me in row)
    column = [row_of_others[row.index(me)] for row_of_others in table]
    if everyone is None:
        everyone = world_among(ranks, groups, device, chosen=True)
    if size == 1:
        return Mesh(everyone=everyone, group=_alone(everyone), twins=everyone, batch=everyone)
    # A group must not wait for another one in the middle of its backward, so what twins send has another queue.
    group = _some(row, ranks, groups, everyone)
    twins = _some(column, ranks, groups, everyone, own_queue=False)
    return Mesh(everyone=everyone, group=group, twins=twins, batch=everyone)


def _some(
    some: Sequence[int],
    ranks: Sequence[int],
    groups: tuple[dist.ProcessGroup, ...],
    everyone: World,
    *,
    own_queue: bool = True,
) -> World:
    """Return the world of some of everyone's ``ranks``."""
    numbers = tuple(map(list(ranks).index, some))
    return world_among(some, groups, everyone.device, numbers=numbers, among=everyone, own_queue=own_queue)
