"""Recipes: ways to make a placement of a load, and the proposals that they make."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner.balance import shed_excess
from hecate.runtime.placement.topology import Topology


class Recipe(NamedTuple):
    """A way to make a placement."""

    # Hot experts that get a copy on every node (every rank of a single node).
    spread: int
    # Ranks are evened out inside their nodes, by :func:`shed_excess`, and not across them.
    in_nodes: bool
    # Slots that are left get replicas while all transfer stays hidden. They make a wrong prediction cheaper, but with
    # more holders rows are not always dispatched better. None: both are tried.
    fills: bool | None = None


def all_recipes(most: int, topology: Topology, fills: bool | None = None) -> list[Recipe]:
    """Return recipes with 0, 1, 2, 4, ... and ``most`` hot experts on every node, with both ways to even out."""
    spreads = sorted({0, most, *(2**power for power in range(most.bit_length()))})
    return [Recipe(spread, way, fills) for spread in spreads for way in _ways(topology)]


def near_recipes(recipe: Recipe, topology: Topology, turn: int, count: int = 1) -> list[Recipe]:
    """Return ``recipe`` and ``count`` of its neighbours, other ones in every turn; all fill slots alike."""
    # One or two hot experts more or fewer, or the other way to even out.
    near = [recipe._replace(spread=recipe.spread + more) for more in (-1, 1, -2, 2) if recipe.spread + more >= 0]
    near += [recipe._replace(in_nodes=way) for way in _ways(topology) if way != recipe.in_nodes]
    return [recipe, *(near[(count * turn + index) % len(near)] for index in range(min(count, len(near))))]


def _ways(topology: Topology) -> tuple[bool, ...]:
    return (False,) if topology.num_nodes == 1 else (False, True)


@dataclass(frozen=True)
class Proposal:
    """The placement that a recipe makes of a load, before slots are filled."""

    recipe: Recipe
    rows: list[int]  # of each expert
    owners: Owners
    replicas: list[set[int]]  # the ranks beside the owner that hold each expert
    free: list[int]  # slots that are left on each rank
    have: list[dict[int, int]]  # for each rank its rows of each expert that it holds

    @cached_property
    def placement(self) -> Placement:
        return Placement.with_replicas(self.owners, self.replicas)

    @cached_property
    def split(self) -> list[list[int]]:
        """The rows of each expert on each of its holders, in the order of ``placement.holders``."""
        holders, split = self.placement.holders, [[count] for count in self.rows]
        for expert, more in enumerate(self.replicas):
            if more:
                split[expert] = [self.have[rank].get(expert, 0) for rank in holders[expert]]
        return split


def propose(
    rows: list[int], hottest: list[int], owners: Owners, topology: Topology, slots: int, recipe: Recipe
) -> Proposal:
    """Put the hot experts on every node; then, with the slots that are left, even out ranks."""
    replicas: list[set[int]] = [set() for _ in rows]
    free = [slots] * owners.world_size
    _spread(rows, hottest[: recipe.spread], owners, _groups(topology), replicas, free)
    have = shed_excess(rows, owners, replicas, free, topology if recipe.in_nodes else None)
    return Proposal(recipe, rows, owners, replicas, free, have)


def hottest_of(load: NDArray[np.integer], owners: Owners, topology: Topology, slots: int) -> list[int]:
    """Return the experts with rows to put on every node, in that order, as many as slots may take."""
    # An expert needs no copy in its own group, and all groups take turns.
    groups = _groups(topology)
    most = -(-slots * min(map(len, groups)) * len(groups) // (len(groups) - 1))
    order: list[int] = np.argsort(-load, kind="stable")[: np.count_nonzero(load)].tolist()
    if topology.num_nodes == 1:
        return order[:most]
    rows, wanted = load.tolist(), [0] * topology.num_nodes
    waiting: list[deque[int]] = [deque() for _ in wanted]
    for expert in order:
        node = topology.node_of[owners.ranks[expert]]
        wanted[node] += rows[expert]
        waiting[node].append(expert)
    # Rows leave every node for the one whose experts are wanted most, so its hottest expert is next.
    queue = [(-count, node) for node, count in enumerate(wanted) if count]
    heapq.heapify(queue)
    chosen: list[int] = []
    while queue and len(chosen) < most:
        count, node = heapq.heappop(queue)
        chosen.append(waiting[node].popleft())
        if waiting[node]:
            heapq.heappush(queue, (count + rows[chosen[-1]], node))
    return chosen


def _groups(topology: Topology) -> Sequence[tuple[int, ...]]:
    return topology.members if topology.num_nodes > 1 else tuple((rank,) for rank in range(topology.world_size))


def _spread(
    rows: list[int],
    experts: list[int],
    owners: Owners,
    groups: Sequence[tuple[int, ...]],
    replicas: list[set[int]],
    free: list[int],
) -> None:
    """Add a replica of each expert in every group but its owner's, on the rank with a free slot and fewest rows."""
    if not experts:
        return
    # Each replica takes an even share from the owner.
    expected: list[float] = [*owners.rows(rows)]
    for expert in experts:
        owner = owners.ranks[expert]
        share = rows[expert] / len(groups)
        for ranks in groups:
            if owner in ranks:
                continue
            open_ranks = [rank for rank in ranks if free[rank]]
            if open_ranks:
                rank = min(open_ranks, key=lambda rank: (expected[rank], rank))
                replicas[expert].add(rank)
                free[rank] -= 1
                expected[rank] += share
                expected[owner] -= share
