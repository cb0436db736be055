"""Always the same replicas, for measurements of what replicas cost."""

from __future__ import annotations

from dataclasses import dataclass

from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.policy import LayerView, Policy


@dataclass
class Neighbours(Policy):
    """The first experts of every rank are on the next rank too.

    Attributes:
        replicas: how many.
    """

    replicates = True
    replicas: int = 2

    def place(self, layer: LayerView) -> Placement:
        owners = layer.owners
        replicas: list[set[int]] = [set() for _ in owners.ranks]
        for rank in range(owners.world_size):
            for expert in owners.owned_by(rank)[: self.replicas]:
                replicas[expert] = {(rank + 1) % owners.world_size}
        return Placement.with_replicas(owners, replicas)
