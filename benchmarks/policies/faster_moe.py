"""FasterMoE: dynamic shadowing (He et al., PPoPP 2022, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hecate.runtime.planner import Placement, Quotas, Rates, assign_tokens, local_split, step_time
from hecate.runtime.planner.placement import Ints
from hecate.runtime.policies import LayerView, Policy


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
        owners, everyone = layer.owners, set(range(layer.owners.world_size))
        rates = replace(layer.rates, hidden=0.0)
        replicas: list[set[int]] = [set() for _ in rows]
        best = placement
        fastest = self._seconds(layer, rows, best, rates)
        for expert in sorted(range(len(rows)), key=lambda e: (-rows[e], e)):
            replicas[expert] = everyone - {owners.ranks[expert]}
            shadowed = Placement.with_replicas(owners, replicas)
            seconds = self._seconds(layer, rows, shadowed, rates)
            if seconds >= fastest:
                break
            best, fastest = shadowed, seconds
        return best

    @staticmethod
    def _seconds(layer: LayerView, rows: list[int], placement: Placement, rates: Rates) -> float:
        split = local_split(rows, placement, layer.topology)
        return step_time(rows, split, placement, layer.topology, layer.sizes, rates).total

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        return assign_tokens(counts, placement, layer.topology, rank, "nearest")
