"""Materialize: decide which ranks get replicas of which experts, by the paper's Algorithm 1, and deal free slots."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The replicas that a step can afford; negative numbers raise ValueError."""

    overlap_degree: int  # t: how many experts' bytes the compute before the layer can hide
    slots: int  # m: how many replicas fit into a rank's memory beside its own experts

    def __post_init__(self) -> None:
        if self.overlap_degree < 0 or self.slots < 0:
            raise ValueError(f"Budget: overlap_degree and slots must not be negative, got {self}")


def materialize(load: NDArray[np.integer], owners: Owners, topology: Topology, budget: Budget) -> Placement:
    """Replicate the hottest experts, at most ``budget.slots`` on a rank (paper, Algorithm 1, both branches).

    With t <= m the top t experts go to every rank. Otherwise m slots of every rank are dealt to the top t experts, in
    proportion to their rows ``load`` ``[E]`` (:func:`deal`), one slot of each rank before any second one, so a plan
    for fewer slots is part of the plan for more. Experts without rows get none. The paper's "at least one replica for
    each of the top t" is left out: with t near E it spends all slots on cold experts (docs/decisions.md).
    """
    rows = load.tolist()
    world_size = owners.world_size
    top = min(budget.overlap_degree, len(rows))
    slots = min(budget.slots, top)
    hottest = [e for e in sorted(range(len(rows)), key=lambda e: (-rows[e], e))[:top] if rows[e] > 0]
    replicas: list[set[int]] = [set() for _ in rows]
    if top <= slots:
        for expert in hottest:
            replicas[expert] = set(range(world_size)) - {owners.ranks[expert]}
        return Placement.with_replicas(owners, replicas)
    for _ in range(slots):
        deal(rows, hottest, owners, replicas, [list(ranks) for ranks in topology.members], topology)
    return Placement.with_replicas(owners, replicas)


def deal(
    rows: Sequence[int],
    experts: Sequence[int],
    owners: Owners,
    replicas: list[set[int]],
    free: list[list[int]],
    topology: Topology,
) -> None:
    """Give each ``free`` slot to that of ``experts`` with most rows per holder, on a rank that does not hold it yet.

    The rank is the first in ``free`` of its node, which is one with fewest copies of the expert, the first in turn of
    such nodes. ``replicas`` are added to, ``free`` is taken from, until no slot is free or no expert can take one.
    """
    turn = 0
    held: dict[int, list[int]] = {}
    # A heap keeps the smallest first, so rows per holder are negative; ties go to the smaller id.
    queue = [(-rows[e] / (1 + len(replicas[e])), e) for e in experts if len(replicas[e]) < owners.world_size - 1]
    heapq.heapify(queue)
    while queue and any(free):
        _, expert = heapq.heappop(queue)
        if expert not in held:
            held[expert] = [0] * topology.num_nodes
            for rank in (owners.ranks[expert], *replicas[expert]):
                held[expert][topology.node_of[rank]] += 1
        taken = _take_rank(owners.ranks[expert], replicas[expert], held[expert], free, turn)
        if taken is None:
            continue
        node, rank = taken
        replicas[expert].add(rank)
        held[expert][node] += 1
        # Nodes take turns, so that their free slots run out together.
        turn = (node + 1) % topology.num_nodes
        if len(replicas[expert]) < owners.world_size - 1:
            heapq.heappush(queue, (-rows[expert] / (1 + len(replicas[expert])), expert))


def _take_rank(
    owner: int, replicas: set[int], held: list[int], free: list[list[int]], turn: int
) -> tuple[int, int] | None:
    """Take a free slot of a rank without the expert, on a node with fewest copies, in turns from ``turn`` on."""
    order = [*range(turn, len(held)), *range(turn)]
    for wanted in sorted(set(held)):
        for node in order:
            if held[node] != wanted:
                continue
            for index, rank in enumerate(free[node]):
                if rank != owner and rank not in replicas:
                    del free[node][index]
                    return node, rank
    return None
