"""LAER-MoE: a new layout of all experts in every iteration (fully sharded expert parallelism, ASPLOS 2026)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Quotas, assign_tokens, expected_load, local_split
from hecate.runtime.placement.policy import LayerView, Policy
from hecate.runtime.placement.topology import Topology


@dataclass
class Laer(Policy):
    """Every rank holds C whole experts in a step: its share of all, and ``replicas`` more; any expert, anywhere.

    Copies go where a copy has most rows, and then to the rank with least load. Two ways to count copies are compared
    by the predicted time of the exchange and of the busiest rank (T = 4 T_comm + 3 max T_comp in their paper). Rows
    stay in the node where it holds their expert, and are split evenly otherwise.

    In FSEP every rank keeps a slice of every expert and an all-to-all rebuilds C of them, so C * (W - 1) / W experts
    arrive at and leave every rank. Here experts have owners: what a rank does not own of its layout travels, which
    may be all of it, and a hot expert leaves from one rank. Owners keep theirs beside the layout, and get no rows for
    it.

    Attributes:
        replicas: C, less a rank's share of the experts.
        window: steps that the expected load is the mean of.
    """

    replicates = True
    replicas: int = 2
    window: int = 5
    _layouts: dict[int, tuple[Placement, Placement]] = field(default_factory=dict, repr=False, compare=False)

    def place(self, layer: LayerView) -> Placement:
        even = np.ones(len(layer.owners.ranks), dtype=np.int64)
        rows = expected_load(layer.loads, self.window) if layer.loads else even
        layout = self.layout(rows.tolist(), layer)
        placement = Placement.with_replicas(layer.owners, [set(ranks) for ranks in layout.holders])
        self._layouts[layer.id] = placement, layout
        return placement

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        made, layout = self._layouts[layer.id]
        if made != placement:
            raise RuntimeError("Laer: rows are assigned for another placement than the last one")
        return assign_tokens(counts, layout, layer.topology, rank, "nearest")

    def layout(self, rows: list[int], layer: LayerView) -> Placement:
        """Who holds what, whoever owns it. The first holder stands for the owner."""
        world_size, experts = layer.topology.world_size, len(rows)
        slots = -(-experts // world_size) + self.replicas
        candidates = [
            _relocate(rows, copies, slots, layer.topology)
            for copies in (
                _by_load(rows, slots * world_size, world_size),
                _evenly(rows, slots * world_size, world_size),
            )
        ]
        return min(candidates, key=lambda layout: _seconds(rows, layout, layer))


def _by_load(rows: list[int], slots: int, most: int) -> list[int]:
    """Copies of each expert: one more for whatever has most rows per copy, until slots are full."""
    copies = [1] * len(rows)
    heap = [(-count, expert) for expert, count in enumerate(rows)]
    heapq.heapify(heap)
    for _ in range(slots - len(rows)):
        while heap and copies[heap[0][1]] >= most:
            heapq.heappop(heap)
        if not heap:
            break
        expert = heap[0][1]
        copies[expert] += 1
        heapq.heapreplace(heap, (-rows[expert] / copies[expert], expert))
    return copies


def _evenly(rows: list[int], slots: int, most: int) -> list[int]:
    """As many copies of every expert, and one more for the hottest."""
    each, more = divmod(slots, len(rows))
    hottest = sorted(range(len(rows)), key=lambda e: (-rows[e], e))[:more]
    return [min(most, each + (expert in hottest)) for expert in range(len(rows))]


def _relocate(rows: list[int], copies: list[int], slots: int, topology: Topology) -> Placement:
    """Give every copy to the rank with least load that has room; nodes that lack the expert first."""
    world_size = topology.world_size
    load, free = [0.0] * world_size, [slots] * world_size
    holders: list[set[int]] = [set() for _ in rows]
    for expert in sorted(range(len(rows)), key=lambda e: (-rows[e] / copies[e], e)):
        for _ in range(copies[expert]):
            nodes = {topology.node_of[rank] for rank in holders[expert]}
            room = [rank for rank in range(world_size) if free[rank] and rank not in holders[expert]]
            if not room:
                break
            rank = min(room, key=lambda r: (topology.node_of[r] in nodes, load[r], r))
            holders[expert].add(rank)
            load[rank] += rows[expert] / copies[expert]
            free[rank] -= 1
    held = tuple(tuple(sorted(ranks)) for ranks in holders)
    return Placement(Owners(tuple(ranks[0] for ranks in held), world_size), held)


def _seconds(rows: list[int], layout: Placement, layer: LayerView) -> float:
    split = local_split(rows, layout, layer.topology)
    # In FSEP experts travel the same in every layout.
    return sum(layer.costs.work(rows, split, layout))
