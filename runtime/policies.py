"""Who holds what, and who computes what: policies behind one interface.

A policy sees loads and sizes and returns placements. It never communicates and never looks at its own rank, so all
ranks come to the same plan. The engine (``hecate.runtime.placer``, the operators, the passes) knows only
:class:`Policy`; give an instance of your own to ``hecate.Config(policy=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hecate.runtime.owners import Owners
from hecate.runtime.planner import (
    Budget,
    Dispatch,
    Placement,
    Quotas,
    Rates,
    Sizes,
    Topology,
    assign_tokens,
    materialize,
    materialize_fastest,
    materialize_spread,
    predict,
    quota_matrix,
    shard_owners,
    step_time,
    transfer_time,
)
from hecate.runtime.planner.balance import balance
from hecate.runtime.planner.placement import Ints

Objective = Literal["time", "paper"]

# Steps between comparisons of placements by predicted time.
_COMPARE_EVERY = 4


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """What a policy may know about one layer. Equal on all ranks.

    Attributes:
        id: number of the layer, a key for what a policy remembers.
        owners: who owns what now.
        loads: rows per expert in the last steps, oldest first, at most ``Policy.window`` of them; ``[T][E]``.
        long_load: mean rows per expert and step since owners were last reconsidered, ``[E]``.
        topology: ranks in nodes.
        sizes: bytes and operations.
        rates: how fast the machine is.
    """

    id: int
    owners: Owners
    loads: Sequence[Ints]
    long_load: Ints
    topology: Topology
    sizes: Sizes
    rates: Rates


class Policy:
    """The interface, and the static policy: owners compute their experts, and nothing is replicated.

    Attributes:
        replicates: whether :meth:`place` or :meth:`calibrate` may return replicas. Without it the graph has no
            sparse collectives at all.
        calibrates: whether to ask again after the gate, on the critical path.
        needs_rates: whether the machine must be measured.
        window: steps of history to keep.
        reshard_every: optimizer steps between calls of :meth:`own`; 0 for never.
    """

    replicates: bool = False
    calibrates: bool = False
    needs_rates: bool = False
    window: int = 1
    reshard_every: int = 0

    def __repr__(self) -> str:
        # Ranks compare their options as text, which must not hold an address: so no functions in public attributes.
        options = {name: value for name, value in sorted(vars(self).items()) if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def place(self, layer: LayerView) -> Placement:
        """Holders for the next step, before its gate has run: owners and replicas."""
        return Placement.owned(layer.owners)

    def calibrate(self, layer: LayerView, placement: Placement, counts: Ints) -> Placement:
        """More holders, now that the rows ``[W, E]`` are known. Must include ``placement``."""
        return placement

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        """Split the rows ``[W, E]`` over the holders."""
        return assign_tokens(counts, placement, layer.topology, rank)

    def own(self, layers: Sequence[LayerView]) -> list[Owners]:
        """New owners of all layers, for a step boundary."""
        return [layer.owners for layer in layers]


@dataclass
class Static(Policy):
    """Expert parallelism: every expert is computed by its owner."""


@dataclass
class Hecate(Policy):
    """Sparse materialization, heterogeneous sharding and topology-aware dispatch (paper, section 4).

    Attributes:
        objective: ``"time"`` chooses replicas by predicted step time and balances rows over the holders;
            ``"paper"`` is Algorithm 1 with t from what overlap hides, and the nearest holder computes.
        replicas: m, most replicas on a rank.
        window: steps that the predicted load is the mean of.
        reshard_every: optimizer steps between re-shardings (Algorithm 2); 0 for never.
        calibrates: place again after the gate, if predicted to be faster net of the transfer.
    """

    objective: Objective = "time"
    replicas: int = 2
    window: int = 5
    reshard_every: int = 100
    calibrates: bool = False
    _chosen: dict[int, tuple[int, int | None]] = field(default_factory=dict, repr=False, compare=False)

    needs_rates = True

    @property
    def replicates(self) -> bool:  # type: ignore[override]
        """Without slots there is nothing to gather."""
        return self.replicas > 0

    def place(self, layer: LayerView) -> Placement:
        if not layer.loads:
            return Placement.owned(layer.owners)
        load = predict(layer.loads, self.window)
        if self.objective == "paper":
            budget = Budget(overlap=overlap_degree(layer), slots=self.replicas)
            return materialize(load, layer.owners, layer.topology, budget)
        return self._place_fast(layer, load)

    def _place_fast(self, layer: LayerView, load: Ints) -> Placement:
        """Loads drift, so what was best is good for a few steps; comparing takes most of a plan's time."""
        turn, spread = self._chosen.get(layer.id, (0, None))
        given: dict[str, Any] = dict(slots=self.replicas, sizes=layer.sizes, rates=layer.rates)
        if turn % _COMPARE_EVERY == 0:
            # At the start everything is tried, later the neighbours.
            spreads = None if turn == 0 else (0, (spread or 0) // 2, spread or 0, max(1, 2 * (spread or 0)))
            choice = materialize_fastest(load, layer.owners, layer.topology, spreads=spreads, **given)
            placement, spread = choice.placement, choice.spread
        elif spread is None:
            placement = Placement.owned(layer.owners)
        else:
            placement = materialize_spread(load, layer.owners, layer.topology, spread=spread, **given)
        self._chosen[layer.id] = (turn + 1, spread)
        return placement

    def calibrate(self, layer: LayerView, placement: Placement, counts: Ints) -> Placement:
        load = counts.sum(0)
        free = self.replicas - np.bincount(placement.pairs[1], minlength=layer.topology.world_size)
        free += np.bincount(placement.owner_array, minlength=layer.topology.world_size)
        choice = materialize_fastest(
            load, layer.owners, layer.topology, slots=self.replicas, sizes=layer.sizes, rates=layer.rates
        )
        merged = _merge(placement, choice.placement, free.tolist())
        if merged.num_replicas == placement.num_replicas:
            return placement
        now = self._time(layer, load, placement)
        extra = transfer_time(merged, layer.topology, layer.sizes, layer.rates)
        extra -= transfer_time(placement, layer.topology, layer.sizes, layer.rates)
        return merged if self._time(layer, load, merged) + extra < now else placement

    def _time(self, layer: LayerView, load: Ints, placement: Placement) -> float:
        """Compute and rows, without the transfer."""
        rows = load.tolist()
        time = step_time(rows, balance(rows, placement), placement, layer.topology, layer.sizes, layer.rates)
        return time.compute + time.rows

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        how: Dispatch = "balanced" if self.objective == "time" else "nearest"
        return assign_tokens(counts, placement, layer.topology, rank, how)

    def own(self, layers: Sequence[LayerView]) -> list[Owners]:
        old = [layer.owners for layer in layers]
        loads = [layer.long_load for layer in layers]
        hot = [self._expected_hot(layer) for layer in layers]
        new = shard_owners(loads, old, layers[0].topology, hot)
        # Every re-sharding moves parameters and optimizer state, so noise must not cause one.
        return new if _cold_peak(loads, new, hot) < 0.95 * _cold_peak(loads, old, hot) else old

    def _expected_hot(self, layer: LayerView) -> int:
        """t: how many experts of a layer will be replicated, so that it matters little who owns them."""
        if self.objective == "paper":
            return overlap_degree(layer)
        choice = materialize_fastest(
            layer.long_load, layer.owners, layer.topology, slots=self.replicas, sizes=layer.sizes,
            rates=layer.rates,
        )  # fmt: skip
        return sum(len(ranks) > 1 for ranks in choice.placement.holders)


def overlap_degree(layer: LayerView) -> int:
    """t, how many experts can cross to a node in the time that is hidden (paper, section 4)."""
    topology, rates = layer.topology, layer.rates
    link = rates.node_bytes if topology.num_nodes > 1 else rates.rank_bytes
    return int(rates.hidden * link / layer.sizes.expert_bytes) if layer.sizes.expert_bytes else 0


def _merge(placement: Placement, more: Placement, free: list[int]) -> Placement:
    """The holders of ``placement``, and those of ``more`` for which their rank has a slot left."""
    replicas: list[set[int]] = []
    for have, want in zip(placement.holders, more.holders, strict=True):
        added = {rank for rank in want if rank not in have and free[rank] > 0}
        for rank in added:
            free[rank] -= 1
        replicas.append({*have, *added})
    return Placement.with_replicas(placement.owners, replicas)


def _cold_peak(loads: Sequence[Ints], owners: Sequence[Owners], hot: Sequence[int]) -> int:
    """Rows of the busiest owner without the hottest experts, summed over layers."""
    total = 0
    for load, owned, count in zip(loads, owners, hot, strict=True):
        cold = load.copy()
        cold[np.argsort(-load, kind="stable")[:count]] = 0
        placement = Placement.owned(owned)
        total += int(quota_matrix([[rows] for rows in cold.tolist()], placement).sum(0).max())
    return total
