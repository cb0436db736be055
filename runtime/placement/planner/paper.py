"""Materialize: decide which ranks get replicas of which experts, by the paper's Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner.dealing import deal
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
