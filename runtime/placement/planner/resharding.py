"""Re-shard: choose owners by the paper's Algorithm 2, or by swaps that shorten the predicted time of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner.cost import CostModel
from hecate.runtime.placement.planner.fastest import seconds_of
from hecate.runtime.placement.planner.recipes import Recipe
from hecate.runtime.placement.topology import Topology

# Swaps that are tried in a layer: the hottest experts, each with a few others. Plans take longer with more ranks and
# experts, so fewer are tried there.
_HOTTEST, _PARTNERS, _MOST, _EFFORT = 16, 8, 64, 2**14
# A swap must make a step this much faster.
_WORTH_SWAPPING = 0.998


def swap_owners(
    load: NDArray[np.integer], owners: Owners, costs: CostModel, *, slots: int, recipe: Recipe | None
) -> Owners:
    """Let pairs of experts change places as long as that makes a step faster, with the replicas of ``recipe``.

    Each of the hottest experts takes the best of eight places: those of hotter and colder ones alike, spaced evenly
    in the order of load. It goes on until none gets a better place, or enough was tried.
    """
    rows = load.tolist()
    order = sorted(range(len(rows)), key=lambda e: (-rows[e], e))
    least = seconds_of(load, owners, costs, slots=slots, recipe=recipe)
    left = min(_MOST, _EFFORT // (owners.world_size + len(rows)))
    better = True
    while better:
        better = False
        for place, expert in enumerate(order[:_HOTTEST]):
            found = owners
            for turn in range(1, _PARTNERS + 1):
                other = order[(place + turn * len(order) // _PARTNERS) % len(order)]
                if owners.ranks[other] == owners.ranks[expert]:
                    continue
                if not left:
                    return found
                left -= 1
                swapped = _swap(owners, expert, other)
                seconds = seconds_of(load, swapped, costs, slots=slots, recipe=recipe)
                if seconds < _WORTH_SWAPPING * least:
                    found, least, better = swapped, seconds, True
            owners = found
    return owners


def _swap(owners: Owners, one: int, other: int) -> Owners:
    ranks = list(owners.ranks)
    ranks[one], ranks[other] = ranks[other], ranks[one]
    return Owners(tuple(ranks), owners.world_size)


def shard_owners(
    loads: Sequence[NDArray[np.integer]], owners: Sequence[Owners], topology: Topology, overlap: Sequence[int]
) -> list[Owners]:
    """Choose owners of the cold experts of every layer so that all ranks own about as many rows (paper, Algorithm 2).

    The ``overlap[g]`` hottest experts of layer g will be replicated anyway, so they fill the slots that remain. A
    rank keeps as many owner slots over the whole model as it has now, any number in one layer. Layers are visited by
    their hottest expert, descending; each cold expert, hottest first, goes to the node with least load in this layer
    that has a free slot, then to the rank with least load on it. Ties go by load over all layers so far, then to
    fewer free slots, then to the smaller id.
    """
    rows = [load.tolist() for load in loads]
    world_size = topology.world_size
    free = [sum(layer.counts[rank] for layer in owners) for rank in range(world_size)]
    total = [0] * world_size
    result: list[list[int | None]] = [[None] * len(load) for load in rows]
    visits = sorted(range(len(rows)), key=lambda layer: (-max(rows[layer], default=0), layer))
    for layer in visits:
        order = sorted(range(len(rows[layer])), key=lambda e: (-rows[layer][e], e))
        here = [0] * world_size
        for expert in order[overlap[layer] :]:
            rank = _least_loaded(here, total, free, topology)
            result[layer][expert] = rank
            here[rank] += rows[layer][expert]
            total[rank] += rows[layer][expert]
            free[rank] -= 1
    chosen = []
    for layer in range(len(rows)):
        ranks: list[int] = []
        for given in result[layer]:
            rank = max(range(world_size), key=lambda r: (free[r], -total[r], -r)) if given is None else given
            free[rank] -= given is None
            ranks.append(rank)
        chosen.append(Owners(tuple(ranks), world_size))
    return chosen


def _least_loaded(here: list[int], total: list[int], free: list[int], topology: Topology) -> int:
    """Return a rank with a free slot, on the node with least load in this layer."""

    def load_of(ranks: Sequence[int]) -> tuple[float, float, int]:
        # The load is per rank, since nodes may have different numbers of them.
        return (
            sum(here[r] for r in ranks) / len(ranks),
            sum(total[r] for r in ranks) / len(ranks),
            sum(free[r] for r in ranks),
        )

    # ``min`` takes the first of equals.
    node = min((ranks for ranks in topology.members if any(free[r] for r in ranks)), key=load_of)
    return min((rank for rank in node if free[rank]), key=lambda rank: load_of((rank,)))
