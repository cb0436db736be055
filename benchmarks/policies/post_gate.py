"""Exact replication after the gate (UltraEP, 2026)."""

from __future__ import annotations

from dataclasses import dataclass

from hecate.runtime.placement.native import assign_fastest
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Quotas, materialize_fastest
from hecate.runtime.placement.policy import LayerView, Policy


@dataclass
class PostGate(Policy):
    """The true load of every layer and step decides; nothing is predicted, and so nothing hides what travels.

    Placement and quotas are the engine's, for the known load and with no hidden time. UltraEP's kernels, which move
    experts inside an NVLink domain in microseconds, are not part of it.

    Attributes:
        replicas: most replicas on a rank.
    """

    replicates = True
    calibrates: bool = True
    replicas: int = 2

    def calibrate(self, layer: LayerView, placement: Placement, counts: Ints) -> Placement:
        return materialize_fastest(counts.sum(0), layer.owners, layer.costs.exposed, slots=self.replicas).placement

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        return assign_fastest(layer.costs, placement, counts, rank)
