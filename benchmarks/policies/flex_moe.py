"""FlexMoE: replicas that stay, changed step by step (Nie et al., SIGMOD 2023, section 4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.policy import LayerView, Policy


@dataclass
class FlexMoE(Policy):
    """Each step may expand the expert with most rows per copy, and shrink one with few, while ranks are uneven.

    A replica in FlexMoE keeps its optimizer state, so a step all-reduces gradients; here experts are gathered and
    gradients are reduced, which is the same number of bytes. The bytes of a change (parameters and states of an
    expert) are counted in :attr:`changes` and not in the time; memory is ``states`` times that of Hecate's slots.

    Attributes:
        replicas: slots for replicas on each rank, reserved.
        threshold: change only if the busiest rank has more than this times the mean.
        changes_per_step: at most.
        states: what a replica keeps, in sizes of an expert's parameters: parameters, gradient, two of AdamW.
        changes: copies that were made so far, over all layers.
    """

    replicates = True
    replicas: int = 2
    threshold: float = 1.05
    changes_per_step: int = 2
    states: int = 4
    _held: dict[int, list[set[int]]] = field(default_factory=dict, repr=False)
    _changes: int = field(default=0, repr=False)

    @property
    def changes(self) -> int:
        return self._changes

    def place(self, layer: LayerView) -> Placement:
        held = self._held.setdefault(layer.id, [set() for _ in layer.owners.ranks])
        if layer.loads:
            rows = layer.loads[-1].tolist()
            for _ in range(self.changes_per_step):
                if not self._improve(rows, layer, held):
                    break
        return Placement.with_replicas(layer.owners, held)

    def _improve(self, rows: list[int], layer: LayerView, held: list[set[int]]) -> bool:
        """One expansion, after one shrink if there is no free slot; says whether anything was changed."""
        owners, world_size = layer.owners, layer.owners.world_size
        share = [count / (1 + len(more)) for count, more in zip(rows, held, strict=True)]
        load, used = [0.0] * world_size, [0] * world_size
        for expert, (owner, more) in enumerate(zip(owners.ranks, held, strict=True)):
            for rank in (owner, *more):
                load[rank] += share[expert]
                used[rank] += rank != owner
        if max(load) <= self.threshold * sum(load) / world_size:
            return False
        hottest = max(range(len(rows)), key=lambda e: (share[e], -e))
        for rank in sorted(range(world_size), key=lambda r: (load[r], r)):
            if rank == owners.ranks[hottest] or rank in held[hottest]:
                continue
            if used[rank] >= self.replicas:
                if not used[rank]:
                    continue
                coldest = min((e for e, more in enumerate(held) if rank in more), key=lambda e: (share[e], e))
                if share[coldest] >= share[hottest] / 2:
                    continue
                held[coldest].remove(rank)
            held[hottest].add(rank)
            self._changes += 1
            return True
        return False
