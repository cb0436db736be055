"""FlexMoE: replicas that stay, changed step by step (Nie et al., SIGMOD 2023, section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hecate.runtime.placement.native import assign_fastest
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Quotas, split_fastest
from hecate.runtime.placement.policy import LayerView, Policy

# Experts that Migrate looks at, and places for each.
_MIGRATED, _PLACES = 8, 8


class _Change(NamedTuple):
    """A replica more, and perhaps one less on the same rank."""

    expert: int
    rank: int
    shrunk: int | None


@dataclass
class FlexMoE(Policy):
    """While ranks are uneven, each step may Expand hot experts and Shrink cold ones; now and then one may Migrate.

    - Expand: one of the experts with most rows per copy gets a replica, on the rank where that is fastest. Where no
      slot is free, the replica with fewest rows there makes room (Shrink).
    - Migrate: two experts change places.
    - A cost model checks each change: a step must get faster by more than the change takes, spread over the steps
      that it is taken to last. Theirs sums up compute, all-to-all and the all-reduce of replicas; here it is the
      engine's, which has the same three.

    A replica keeps its optimizer state, so parameters and states travel when it is made: ``benchmarks.replay`` counts
    that in the time, from the nearest copy and hidden behind nothing, though theirs travels beside training. In a
    step replicas all-reduce gradients; here experts are gathered and gradients reduced, as many bytes, hidden as
    Hecate's are. Rows are split as Hecate does, not by its authors' router. What the engine cannot show: memory,
    which is ``states`` times that of Hecate's slots, and several copies on one rank. How many changes a step may
    make, how many experts it looks at and how long a change lasts are ours.

    Attributes:
        replicas: slots for replicas on each rank, reserved.
        threshold: change only if the busiest rank has more than this times the mean.
        changes_per_step: at most.
        candidates: experts with most rows per copy that are looked at for a change.
        lasts: steps that a change is taken to last.
        reshard_every: steps between two times that each layer may Migrate once.
        states: what a replica keeps, in sizes of an expert's parameters: parameters, gradient, two of AdamW.
        changes: copies that were made so far, over all layers.
    """

    replicates = True
    replicas: int = 2
    threshold: float = 1.05
    changes_per_step: int = 2
    candidates: int = 3
    lasts: int = 25
    reshard_every: int = 10
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

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        return assign_fastest(layer.costs, placement, counts, rank)

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        return [self._migrate(layer) for layer in layers]

    def _improve(self, rows: list[int], layer: LayerView, held: list[set[int]]) -> bool:
        """The best change, if it pays; says whether anything was changed."""
        best, least = None, _seconds(rows, layer, layer.owners, held)
        for change in self._changes_of(rows, layer.owners, held):
            _apply(change, held)
            seconds = _seconds(rows, layer, layer.owners, held)
            _undo(change, held)
            copies = (layer.owners.ranks[change.expert], *held[change.expert])
            seconds += _copy_seconds(layer, copies, change.rank) / self.lasts
            if seconds < least:
                best, least = change, seconds
        if best is None:
            return False
        _apply(best, held)
        self._changes += 1
        return True

    def _changes_of(self, rows: list[int], owners: Owners, held: list[set[int]]) -> Iterator[_Change]:
        world_size = owners.world_size
        share = [count / (1 + len(more)) for count, more in zip(rows, held, strict=True)]
        load, replicas = [0.0] * world_size, [list[int]() for _ in range(world_size)]
        for expert, (owner, more) in enumerate(zip(owners.ranks, held, strict=True)):
            for rank in (owner, *more):
                load[rank] += share[expert]
                if rank != owner:
                    replicas[rank].append(expert)
        if max(load) <= self.threshold * sum(load) / world_size:
            return
        for hot in sorted(range(len(rows)), key=lambda e: (-share[e], e))[: self.candidates]:
            for rank in range(world_size):
                if rank == owners.ranks[hot] or rank in held[hot]:
                    continue
                if len(replicas[rank]) < self.replicas:
                    yield _Change(hot, rank, None)
                elif replicas[rank]:
                    yield _Change(hot, rank, min(replicas[rank], key=lambda e: (share[e], e)))

    def _migrate(self, layer: LayerView) -> Owners:
        """Two experts change places, each where only its owner's copy is concerned; the best pair, if it pays."""
        owners, held = layer.owners, self._held.get(layer.id)
        if held is None or not layer.loads:
            return owners
        rows = layer.loads[-1].tolist()
        best, least = owners, _seconds(rows, layer, owners, held)
        order = sorted(range(len(rows)), key=lambda e: (-rows[e], e))
        for place, expert in enumerate(order[:_MIGRATED]):
            for turn in range(1, _PLACES + 1):
                other = order[(place + turn * len(order) // _PLACES) % len(order)]
                here, there = owners.ranks[expert], owners.ranks[other]
                if here == there or there in held[expert] or here in held[other]:
                    continue
                ranks = list(owners.ranks)
                ranks[expert], ranks[other] = there, here
                new = Owners(tuple(ranks), owners.world_size)
                seconds = _seconds(rows, layer, new, held)
                seconds += layer.costs.reshard_seconds(owners, new) / self.lasts
                if seconds < least:
                    best, least = new, seconds
        return best

    def state_dict(self) -> dict[int, Any]:
        return {layer: [sorted(ranks) for ranks in held] for layer, held in self._held.items()}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        self._held = {layer: [set(ranks) for ranks in held] for layer, held in state.items()}


def _apply(change: _Change, held: list[set[int]]) -> None:
    if change.shrunk is not None:
        held[change.shrunk].remove(change.rank)
    held[change.expert].add(change.rank)


def _undo(change: _Change, held: list[set[int]]) -> None:
    held[change.expert].remove(change.rank)
    if change.shrunk is not None:
        held[change.shrunk].add(change.rank)


def _seconds(rows: list[int], layer: LayerView, owners: Owners, held: list[set[int]]) -> float:
    placement = Placement.with_replicas(owners, held)
    return layer.costs.step(rows, split_fastest(rows, placement, layer.costs), placement).total


def _copy_seconds(layer: LayerView, copies: Sequence[int], rank: int) -> float:
    """Parameters and states to ``rank`` from a copy, in its node if there is one."""
    nodes = layer.topology.node_of
    source = min(copies, key=lambda copy: (nodes[copy] != nodes[rank], copy))
    return layer.costs.move_seconds(np.array([source]), np.array([rank]))
