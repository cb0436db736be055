"""Sparse materialization as the paper has it: Algorithm 1."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.owners import Owners
from hecate.runtime.planner.placement import Budget, Placement, Topology


def materialize(load: NDArray[np.integer], owners: Owners, topology: Topology, budget: Budget) -> Placement:
    """Replicate the hottest experts (paper, Algorithm 1, both branches).

    With t <= m the top t experts go to every rank. Otherwise m slots of every rank are dealt to the top t experts,
    in proportion to their load: each slot to the expert with most rows per holder, on the node with fewest copies
    of it, there on the rank with most free slots. Experts without rows get none. The ranks fill one slot each
    before any fills its second, so a plan for fewer slots is part of the plan for more.

    The paper's "at least one replica for each of the top t" is left out: with t near E it spends all slots on
    cold experts (docs/decisions.md).

    Args:
        load: expected rows per expert, ``[E]``.

    Returns:
        At most ``budget.slots`` replicas on a rank, never two copies of an expert on one.
    """
    rows = load.tolist()
    world_size = owners.world_size
    top = min(budget.overlap, len(rows))
    slots = min(budget.slots, top)
    hottest = [e for e in sorted(range(len(rows)), key=lambda e: (-rows[e], e))[:top] if rows[e] > 0]
    replicas: list[set[int]] = [set() for _ in rows]
    if top <= slots:
        for expert in hottest:
            replicas[expert] = set(range(world_size)) - {owners.ranks[expert]}
        return Placement.with_replicas(owners, replicas)
    for _ in range(slots):
        _deal_one_slot(rows, hottest, replicas, owners, topology)
    return Placement.with_replicas(owners, replicas)


def _deal_one_slot(
    rows: list[int], hottest: list[int], replicas: list[set[int]], owners: Owners, topology: Topology
) -> None:
    """Give every rank one more replica, where there is one that it does not hold."""
    free = [list(ranks) for ranks in topology.members]
    left, turn = owners.world_size, 0
    held: dict[int, list[int]] = {}
    # A heap keeps the smallest first, so rows per holder are negative; ties go to the smaller id.
    queue = [(-rows[e] / (1 + len(replicas[e])), e) for e in hottest if len(replicas[e]) < owners.world_size - 1]
    heapq.heapify(queue)
    while left and queue:
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
        left -= 1
        # The node after the last one dealt to has had its turn longest ago: no node has more free slots.
        turn = (node + 1) % topology.num_nodes
        if len(replicas[expert]) < owners.world_size - 1:
            heapq.heappush(queue, (-rows[expert] / (1 + len(replicas[expert])), expert))


def _take_rank(
    owner: int, replicas: set[int], held: list[int], free: list[list[int]], turn: int
) -> tuple[int, int] | None:
    """A node and a rank on it with a free slot that does not hold the expert; it is no longer free.

    Nodes with fewest copies first, in turns from ``turn`` on; None if nobody is left.
    """
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
