"""Deal: give free slots to experts, one after the other, so that each slot makes one more replica."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.topology import Topology


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
