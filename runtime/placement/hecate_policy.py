"""The default policy: sparse materialization, heterogeneous sharding, topology-aware dispatch (paper, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from hecate.runtime.placement import native
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import (
    Budget,
    Quotas,
    Rates,
    Recipe,
    StepTime,
    assign_tokens,
    expected_load,
    local_split,
    materialize,
    near_recipes,
    shard_owners,
    split_fastest,
    steady_steps,
)
from hecate.runtime.placement.policy import LayerView, Policy

Objective = Literal["time", "paper"]
Replicas = int | Literal["auto"]

# Size of an expert's states in units of its parameters, as with Adam: parameters, gradients and two moments.
_STATES = 4

# Steps between searches among all recipes, and while nothing is worth replicating.
_SEARCH_EVERY, _SEARCH_EVERY_IDLE = 32, 4
# Neighbours of the last recipe that a step compares: while loads stay, and while they move. Plans take longer with
# many ranks, and loads of many rows always move.
_NEAR, _NEAR_MOVING, _FEW_RANKS = 1, 3, 16
# New owners must be predicted to be this much faster.
_WORTH_MOVING = 0.98


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The choices with which a layer's last placement was made."""

    rates: Rates
    turn: int = 0  # placements so far
    recipe: Recipe | None = None  # None if nothing is replicated
    slots: int = 0

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> _Chosen:
        recipe = state["recipe"]
        return cls(
            rates=Rates(**state["rates"]),
            turn=state["turn"],
            slots=state["slots"],
            recipe=None if recipe is None else Recipe(*recipe),
        )


@dataclass
class Hecate(Policy):
    """Sparse materialization, heterogeneous sharding and topology-aware dispatch (paper, section 4).

    Attributes:
        objective: ``"time"`` chooses replicas, and how rows are split over the holders, by predicted step time;
            ``"paper"`` is Algorithm 1 with t from the hidden time, and the nearest holder computes.
        replicas: m, most replicas on a rank; ``"auto"``: for each layer as few as are predicted to make a step almost
            as fast as all that ``replica_memory`` allows.
        replica_memory: most memory of a layer's replicas with ``"auto"``, in parts of the states (parameters,
            gradients, two moments) of as many experts as a rank owns on average, and of one where ranks are more.
        window: steps that the predicted load is the mean of; with ``"time"`` at most so many, fewer while it moves.
        reshard_every: optimizer steps between re-shardings; 0 for never. ``"time"`` lets pairs of experts change
            places, ``"paper"`` is Algorithm 2.
        calibrates: place again after the gate, if predicted to be faster net of the transfer.
    """

    objective: Objective = "time"
    replicas: Replicas = "auto"
    window: int = 5
    reshard_every: int = 50
    calibrates: bool = False
    replica_memory: float = 0.25
    _chosen: dict[int, _Chosen] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Without slots there is nothing to gather.
        self.replicates = (self.replica_memory if self.replicas == "auto" else self.replicas) > 0

    def most_replicas(self, owners: Owners) -> int:
        """Return the replicas that a rank may hold of a layer with these owners."""
        return most_replicas(self.replicas, self.replica_memory, owners.num_experts, owners.world_size)

    def _slots(self, layer: LayerView) -> int:
        """Return the replicas that a rank may hold of a layer until it is searched again."""
        chosen = self._chosen.get(layer.id)
        # Owners may have changed since.
        most = self.most_replicas(layer.owners)
        return most if chosen is None else min(most, chosen.slots)

    def place(self, layer: LayerView) -> Placement:
        if not layer.loads:
            return Placement.owned(layer.owners)
        if self.objective == "paper":
            return self._planned(layer, expected_load(layer.loads, self.window), layer.owners)
        return self._place_fast(layer)

    def _place_fast(self, layer: LayerView) -> Placement:
        """Place by the last recipe and a few like it; only now and then all recipes are searched."""
        steps = steady_steps(layer.loads, self.window)
        load = expected_load(layer.loads, steps)
        last = self._chosen.get(layer.id)
        if last is None or last.rates != layer.rates:
            # The best recipe on another machine, or from before this one was measured, is no guide.
            last = _Chosen(rates=layer.rates)
        # Loads drift, so the best recipe is nearly best in the next steps.
        turn, recipe, slots = last.turn, last.recipe, self._slots(layer)
        if turn % (_SEARCH_EVERY_IDLE if recipe is None else _SEARCH_EVERY) == 0:
            slots = self.most_replicas(layer.owners)
            frugal = self.replicas == "auto"
            placement, recipe, slots = native.search(load, layer.owners, layer.costs, slots=slots, frugal=frugal)
        elif recipe is None:
            placement = Placement.owned(layer.owners)
        else:
            moves = steps < min(len(layer.loads), self.window) and layer.topology.world_size <= _FEW_RANKS
            near = near_recipes(recipe, layer.topology, turn, _NEAR_MOVING if moves else _NEAR)
            placement, recipe = native.choose(load, layer.owners, layer.costs, slots=slots, recipes=near)
        self._chosen[layer.id] = _Chosen(turn=turn + 1, recipe=recipe, rates=layer.rates, slots=slots)
        return placement

    def _planned(self, layer: LayerView, load: Ints, owners: Owners, fills: bool | None = None) -> Placement:
        if self.objective == "time":
            return native.search(load, owners, layer.costs, slots=self._slots(layer), fills=fills)[0]
        budget = Budget(overlap_degree=overlap_degree(layer), slots=self.most_replicas(owners))
        return materialize(load, owners, layer.topology, budget)

    def _time(self, layer: LayerView, load: Ints, placement: Placement) -> StepTime:
        """Predict a step with this load, dispatched as this policy does."""
        rows = load.tolist()
        split: Sequence[Sequence[float]] = (
            split_fastest(rows, placement, layer.costs)
            if self.objective == "time"
            else local_split(rows, placement, layer.topology)
        )
        return layer.costs.step(rows, split, placement)

    def calibrate(self, layer: LayerView, placement: Placement, counts: Ints) -> Placement:
        load = counts.sum(0)
        # The load is known, so no slots need be filled in case that it is another.
        planned = self._planned(layer, load, layer.owners, fills=False)
        merged, added = _merge(placement, planned, load, self._slots(layer))
        if not added.num_replicas:
            return placement
        # The gate has run, so nothing hides the added replicas.
        extra = layer.costs.replica_seconds(added)
        before, after = self._time(layer, load, placement), self._time(layer, load, merged)
        return merged if after.compute + after.rows + extra < before.compute + before.rows else placement

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        if self.objective == "paper":
            return assign_tokens(counts, placement, layer.topology, rank, "nearest")
        return native.assign_fastest(layer.costs, placement, counts, rank)

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        return list(map(self._swapped, layers)) if self.objective == "time" else self._sharded(layers)

    def _swapped(self, layer: LayerView) -> Owners:
        """Return the layer's owners after a few swaps, if those pay for their moves until the next time."""
        owners, costs, slots = layer.owners, layer.costs, self._slots(layer)
        chosen = self._chosen.get(layer.id)
        recipe = None if chosen is None else chosen.recipe
        new = native.swapped_owners(layer.long_load, owners, costs, slots=slots, recipe=recipe)
        move = costs.reshard_seconds(owners, new) / max(1, self.reshard_every)
        # Where loads move, neither the long mean nor the last steps alone predict the next ones: both must gain.
        for load in (layer.long_load, self._expected(layer) if layer.loads else layer.long_load):
            before, after = (native.predict(load, o, costs, slots=slots, recipe=recipe) for o in (owners, new))
            # Every re-sharding moves parameters and optimizer state, so noise must not cause one.
            if after + move >= _WORTH_MOVING * before:
                return owners
        return new

    def _sharded(self, layers: Sequence[LayerView]) -> list[Owners]:
        """Return owners by the paper's Algorithm 2, if steps are predicted to be faster with them."""
        old = [layer.owners for layer in layers]
        plans = [self._planned(layer, layer.long_load, layer.owners) for layer in layers]
        # t, the number of experts that will be replicated, so that it matters little who owns them.
        hot = [sum(len(ranks) > 1 for ranks in plan.holders) for plan in plans]
        new = shard_owners([layer.long_load for layer in layers], old, layers[0].topology, hot)
        before = sum(
            self._time(layer, layer.long_load, plan).total for layer, plan in zip(layers, plans, strict=True)
        )
        after = sum(
            self._time(layer, layer.long_load, self._planned(layer, layer.long_load, owners)).total
            for layer, owners in zip(layers, new, strict=True)
        )
        return new if after < _WORTH_MOVING * before else old

    def _expected(self, layer: LayerView) -> Ints:
        return expected_load(layer.loads, steady_steps(layer.loads, self.window))

    def state_dict(self) -> dict[int, Any]:
        return {layer: asdict(chosen) for layer, chosen in self._chosen.items()}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        self._chosen = {layer: _Chosen.from_dict(chosen) for layer, chosen in state.items()}


def most_replicas(replicas: Replicas, memory: float, experts: int, ranks: int) -> int:
    """Return how many replicas of a layer a rank may hold, whoever owns what.

    ``memory`` is in parts of the states of as many experts as a rank owns on average, and at least of one: ranks that
    own none are those to which others' experts should go.
    """
    if replicas != "auto":
        return replicas
    return min(int(memory * _STATES * max(1, experts / ranks)), experts - experts // ranks)


def overlap_degree(layer: LayerView) -> int:
    """Return t: how many experts cross to a node, and their gradients back, in the hidden time (paper, section 4)."""
    topology, rates = layer.topology, layer.rates
    link = rates.node_bytes if topology.num_nodes > 1 else rates.rank_bytes
    travels = layer.sizes.expert_transfers * layer.sizes.expert_bytes
    return int(rates.hidden_seconds * link / travels) if travels else 0


def _merge(placement: Placement, more: Placement, load: Ints, slots: int) -> tuple[Placement, Placement]:
    """Add holders in ``more`` while slots last, hottest experts first; return all holders, and the new ones alone."""
    owners = placement.owners
    free = [slots] * owners.world_size
    for owner, ranks in zip(owners.ranks, placement.holders, strict=True):
        for rank in ranks:
            free[rank] -= rank != owner
    added: list[set[int]] = [set() for _ in owners.ranks]
    for expert in np.argsort(-load, kind="stable").tolist():
        for rank in more.holders[expert]:
            if rank not in placement.holders[expert] and free[rank] > 0:
                added[expert].add(rank)
                free[rank] -= 1
    merged = [{*have, *new} for have, new in zip(placement.holders, added, strict=True)]
    return Placement.with_replicas(owners, merged), Placement.with_replicas(owners, added)
