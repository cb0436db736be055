"""FasterMoE: dynamic shadowing (He et al., PPoPP 2022, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel, Quotas, assign_tokens, local_split
from hecate.runtime.placement.policy import LayerView, Policy


@dataclass
class FasterMoE(Policy):
    """After the gate, the hottest experts go to all ranks, as long as each makes the step faster by the cost model.

    A rank computes its own tokens of a shadowed expert. Shadows take as much memory as they need. The cost model is
    the engine's, with nothing hidden: experts are broadcast when the gate is known. Their overlap of the exchange
    with the experts' compute (smart scheduling) is not part of it.
    """

    replicates = True
    calibrates: bool = True

    def calibrate(self, layer: LayerView, placement: Placement, counts: Ints) -> Placement:
        rows: list[int] = counts.sum(0).tolist()
        owners, everyone, costs = layer.owners, set(range(layer.owners.world_size)), layer.costs.exposed
        replicas: list[set[int]] = [set() for _ in rows]
        best = placement
        fastest = self._seconds(costs, rows, best)
        for expert in sorted(range(len(rows)), key=lambda e: (-rows[e], e)):
            replicas[expert] = everyone - {owners.ranks[expert]}
            shadowed = Placement.with_replicas(owners, replicas)
            seconds = self._seconds(costs, rows, shadowed)
            if seconds >= fastest:
                break
            best, fastest = shadowed, seconds
        return best

    @staticmethod
    def _seconds(costs: CostModel, rows: list[int], placement: Placement) -> float:
        return costs.step(rows, local_split(rows, placement, costs.topology), placement).total

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        return assign_tokens(counts, placement, layer.topology, rank, "nearest")
