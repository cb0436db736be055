"""The ranks of one model in groups: who shares its experts with whom, and who has the same."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hecate.runtime.comm.start import end_with_agent
from hecate.runtime.comm.world import World, be_current, find_world, world_among, world_of


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of one model by what they share.

    What is sharded is sharded in the group, and averaged over twins; what is whole is averaged over everyone.

    Attributes:
        everyone: the ranks that train the model. They agree on its graphs, its options and its steps, average the
            gradients of what each of them has whole, and write one checkpoint.
        group: those of them between whom experts and dense rows are sharded. Routed tokens, counts and replicas
            travel between these, and placements and owners are of these. Everyone, where there is one group.
        twins: the ranks with this one's place in each group: they own the same experts and rows, equal to the last
            bit, and average the gradients of these. This rank alone, where there is one group.
    """

    everyone: World
    group: World
    twins: World

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
) -> Mesh:
    """Return the ranks of ``mesh``, or all that torchrun started, or this process alone, in groups.

    Args:
        mesh: of one dimension, or of two: along the second are the ranks of a group.
        expert_group: ranks of a group; None for those of the mesh, or for all; "auto" for :func:`best_group`.
        experts: how many the layer with the fewest has; None if there are none.

    Raises:
        ValueError: the mesh has more dimensions, or ranks do not make whole groups; or as :func:`find_world`.
    """
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
    if everyone.size % expert_group:
        raise ValueError(
            f"hecate.compile: Config(expert_group={expert_group}) does not divide the {everyone.size} ranks into "
            "whole groups"
        )
    assert everyone.group is not None, "there are several ranks"
    ranks = dist.get_process_group_ranks(everyone.group)
    table = [ranks[start : start + expert_group] for start in range(0, len(ranks), expert_group)]
    return _grouped(table, (everyone.group,), device, everyone)


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
    return Mesh(everyone=everyone, group=everyone, twins=_alone(everyone))


def _alone(everyone: World) -> World:
    """Return the world of this rank alone, as which it is a group of one or has no twins."""
    own = (everyone.rank,)
    return World(
        rank=0, size=1, group=None, device=everyone.device, chosen=True, numbers=own, among=everyone, own_queue=False
    )


def _grouped(
    table: list[list[int]], groups: tuple[dist.ProcessGroup, ...], device: torch.device, everyone: World | None = None
) -> Mesh:
    """Return a mesh with a group for each row of ranks in ``table``; ``groups`` connect them all. A collective."""
    me, size = dist.get_rank(), len(table[0])
    line = next(line for line, row in enumerate(table) if me in row)
    place = table[line].index(me)
    if everyone is None:
        ranks = [rank for row in table for rank in row]
        everyone = world_among(ranks, groups, device, chosen=True)
    numbers = tuple(range(line * size, (line + 1) * size)), tuple(range(place, len(table) * size, size))
    rows = [table[line], [row[place] for row in table]]
    if size == 1:
        return Mesh(everyone=everyone, group=_alone(everyone), twins=everyone)
    # A group must not wait for another one in the middle of its backward, so what twins send has another queue.
    group = world_among(rows[0], groups, device, numbers=numbers[0], among=everyone)
    twins = world_among(rows[1], groups, device, numbers=numbers[1], among=everyone, own_queue=False)
    return Mesh(everyone=everyone, group=group, twins=twins)
