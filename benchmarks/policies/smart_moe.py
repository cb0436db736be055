"""SmartMoE: experts change places every few steps (Zhai et al., ATC 2023, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.policy import LayerView, Policy


@dataclass
class SmartMoE(Policy):
    """Owners are permuted so that ranks have even loads, each as many experts of a layer as before; no replicas.

    Experts go by descending load to the rank with least load that has room. A layer keeps its owners if its busiest
    rank would not get less to do. The search over parallel strategies (the offline pool) is not part of it.

    Attributes:
        reshard_every: optimizer steps between permutations.
    """

    reshard_every: int = 25

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        return [self._permute(layer) for layer in layers]

    @staticmethod
    def _permute(layer: LayerView) -> Owners:
        rows, old = layer.long_load.tolist(), layer.owners
        free, load = list(old.counts), [0] * old.world_size
        ranks = [0] * len(rows)
        for expert in sorted(range(len(rows)), key=lambda e: (-rows[e], e)):
            rank = min((r for r in range(old.world_size) if free[r]), key=lambda r: (load[r], r))
            ranks[expert] = rank
            free[rank] -= 1
            load[rank] += rows[expert]
        before = [0] * old.world_size
        for count, rank in zip(rows, old.ranks, strict=True):
            before[rank] += count
        return Owners(tuple(ranks), old.world_size) if max(load) < max(before) else old
