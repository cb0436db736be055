"""Policies that do what no sensible one would, to see that the numbers stay right."""

from __future__ import annotations

import random
from typing import Any

from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.policy import LayerView, Policy


class Anything(Policy):
    """Random replicas in every step and random owners at every re-sharding: the worst a policy may do."""

    replicates = True

    def __init__(self, seed: int = 0, reshard_every: int = 0, calibrates: bool = False) -> None:
        self.seed, self.reshard_every, self.calibrates = seed, reshard_every, calibrates
        self._random = random.Random(seed)

    def _replicas(self, owners: Owners) -> list[set[int]]:
        ranks = range(owners.world_size)
        return [{rank for rank in ranks if self._random.random() < 0.4} for _ in owners.ranks]

    def place(self, layer: LayerView) -> Placement:
        return Placement.with_replicas(layer.owners, self._replicas(layer.owners))

    def calibrate(self, layer: LayerView, placement: Placement, counts: Any) -> Placement:
        more = zip(placement.holders, self._replicas(layer.owners), strict=True)
        return Placement.with_replicas(layer.owners, [{*have, *new} for have, new in more])

    def choose_owners(self, layers: Any) -> list[Owners]:
        """Any owners at all; a rank may be left with none."""
        size = layers[0].owners.world_size
        return [Owners(tuple(self._random.randrange(size) for _ in layer.owners.ranks), size) for layer in layers]


class Moving(Anything):
    """Owners change, nothing is replicated."""

    replicates = False

    def place(self, layer: LayerView) -> Placement:
        return Placement.owned(layer.owners)


class Restless(Hecate):
    """Hecate, but experts change owners every time; in runs as short as a test's no move pays."""

    def choose_owners(self, layers: Any) -> list[Owners]:
        return [Owners((*layer.owners.ranks[1:], layer.owners.ranks[0]), layer.owners.world_size) for layer in layers]
