"""Predict: add up a step's seconds of the busiest rank, of the busiest link, and of exposed transfer of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement, changes
from hecate.runtime.placement.planner.stages import hops
from hecate.runtime.placement.topology import Topology

Floats = NDArray[np.float64]

# Passes over rows and links in one step: forward, and twice that in backward; rows go there and back in each
# direction.
_COMPUTE, _ROWS = 3, 4
# States that move with an expert to another owner: its parameters and two moments, as with Adam.
_STATES = 3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of the machine, for one layer or all. Equal on all ranks.

    Attributes:
        flops: floating-point operations per second of one rank in expert matmuls.
        rank_bytes: bytes per second that a rank sends (and receives) inside its node.
        node_bytes: bytes per second that a node sends (and receives).
        memory_bytes: bytes per second that a rank reads and writes in its own memory.
        hidden_seconds: per layer and step, those in which experts and their gradients travel behind other work.

    Raises:
        ValueError: a rate that is not positive, or a negative time.
    """

    flops: float
    rank_bytes: float
    node_bytes: float
    memory_bytes: float = 1e10
    hidden_seconds: float = 0.0

    def __post_init__(self) -> None:
        if min(self.flops, self.rank_bytes, self.node_bytes, self.memory_bytes) <= 0 or self.hidden_seconds < 0:
            raise ValueError(f"hecate.Rates: rates must be positive and hidden_seconds not negative, got {self}")


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The operations and bytes of one layer.

    Attributes:
        row_flops: operations on one row in the forward.
        row_bytes: bytes of one row in a collective.
        expert_bytes: bytes of all parameters of one expert in a collective.
        expert_transfers: times that a replica crosses the link in a step: it comes once, again for the backward if it
            is rematerialized, and its gradient leaves once.
        together: rows of a token, where its row crosses to each node once; 1 where each crosses by itself.
    """

    row_flops: float
    row_bytes: float
    expert_bytes: float
    expert_transfers: int = 2
    together: int = 1


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one layer, forward and backward."""

    compute: float  # the rank with most rows
    rows: float  # rows on the busiest link
    experts: float  # replicas and their gradients on the busiest link, hidden or not
    exposed: float  # the part of ``experts`` that nothing hides

    @property
    def total(self) -> float:
        return self.compute + self.rows + self.exposed


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The time of a step of one layer, if every rank routes the same share of each expert's rows.

    ``rows`` are of each expert, length E, and ``split`` the rows of each expert on each of its holders, in the order
    of ``placement.holders``.
    """

    topology: Topology
    sizes: LayerSizes
    rates: Rates

    def step(self, rows: list[int], split: Sequence[Sequence[float]], placement: Placement) -> StepTime:
        """Predict a step."""
        compute, seconds = self.work(rows, split, placement)
        travel = self.replica_seconds(placement)
        exposed = max(0.0, travel - self.rates.hidden_seconds)
        return StepTime(compute=compute, rows=seconds, experts=travel, exposed=exposed)

    def exposed_seconds(self, placement: Placement) -> float:
        """Return ``exposed`` of :meth:`step`, which depends on the replicas alone."""
        return max(0.0, self.replica_seconds(placement) - self.rates.hidden_seconds)

    def work(self, rows: list[int], split: Sequence[Sequence[float]], placement: Placement) -> tuple[float, float]:
        """Return ``compute`` and ``rows`` of :meth:`step`, which depend on ``split``."""
        topology, rates = self.topology, self.rates
        world_size, num_nodes = topology.world_size, topology.num_nodes
        experts, ranks = placement.pairs
        load = np.asarray(rows, dtype=np.int64)
        total = int(load.sum())
        quota = np.fromiter(chain.from_iterable(split), dtype=np.float64, count=len(ranks))
        computed = np.bincount(ranks, quota, minlength=world_size)
        seconds = 0.0
        if num_nodes > 1:
            share = topology.node_sizes / world_size
            expert, node, on_node = _visits(experts, topology.nodes[ranks], quota, topology)
            received, sent = _exchanged(total * share, load[expert] * share[node], on_node, node)
            received = self._crossing(received, total * (1 - share))
            sent = self._crossing(sent, total * share * (num_nodes - 1))
            seconds = float(max(received.max(), sent.max())) / rates.node_bytes
        if world_size > num_nodes:
            own = np.full(world_size, total / world_size)
            received, sent = _exchanged(own, load[experts] / world_size, quota, ranks)
            seconds = max(seconds, float(max(received.max(), sent.max())) / rates.rank_bytes)
        return self.compute(float(computed.max())), _ROWS * seconds * self.sizes.row_bytes

    def owners_work(self, rows: list[int], owners: Owners) -> tuple[float, float]:
        """Return :meth:`work` if owners compute all rows of their experts."""
        topology, rates = self.topology, self.rates
        world_size, total, level = topology.world_size, sum(rows), owners.rows(rows)
        seconds = 0.0
        if topology.num_nodes > 1:
            for ranks in topology.members:
                share, owned = len(ranks) / world_size, sum([level[rank] for rank in ranks])
                received, sent = owned * (1 - share), (total - owned) * share
                if self.sizes.together > 1:
                    received = self._crossing(received, total * (1 - share))
                    sent = self._crossing(sent, total * share * (topology.num_nodes - 1))
                seconds = max(seconds, received, sent)
            seconds /= rates.node_bytes
        if world_size > topology.num_nodes:
            most = max(max(level) * (world_size - 1), total - min(level)) / world_size
            seconds = max(seconds, most / rates.rank_bytes)
        return self.compute(max(level)), _ROWS * seconds * self.sizes.row_bytes

    def _crossing(self, rows: Any, of: Any) -> Any:
        """Return how many rows cross a node's link if ``rows`` of ``of`` are computed there; numbers or arrays."""
        together = self.sizes.together
        if together == 1:
            return rows
        # A token crosses once if any of its rows does; these are assumed to choose independently.
        part = rows / np.maximum(of, 1)
        return of * (1 - (1 - part) ** together) / together

    def compute(self, rows: float) -> float:
        """Return the seconds in which one rank computes so many rows, forward and backward."""
        return _COMPUTE * rows * self.sizes.row_flops / self.rates.flops

    @property
    def exposed(self) -> CostModel:
        """This cost model if nothing hid a transfer."""
        return replace(self, rates=replace(self.rates, hidden_seconds=0.0))

    def replica_seconds(self, placement: Placement) -> float:
        """Return the seconds in which replicas come and their gradients leave, one stage after the other."""
        if placement.num_replicas == 0:
            return 0.0
        (_, owners, leaders), (_, sources, destinations) = hops(placement, self.topology)
        nodes = self.topology.nodes
        copies = _most(nodes[owners], nodes[leaders]) / self.rates.node_bytes
        copies += _most(sources, destinations) / self.rates.rank_bytes
        return self.sizes.expert_transfers * copies * self.sizes.expert_bytes

    def move_seconds(self, sources: Ints, destinations: Ints) -> float:
        """Return the seconds to move experts with their optimizer state, hidden by nothing, between ranks ``[n]``."""
        nodes = self.topology.nodes
        inside = nodes[sources] == nodes[destinations]
        across = _most(nodes[sources[~inside]], nodes[destinations[~inside]]) / self.rates.node_bytes
        within = _most(sources[inside], destinations[inside]) / self.rates.rank_bytes
        return _STATES * max(across, within) * self.sizes.expert_bytes

    def reshard_seconds(self, old: Owners, new: Owners) -> float:
        """Return :meth:`move_seconds` of the experts that change owners."""
        moves = np.flatnonzero(old.array != new.array)
        return self.move_seconds(old.array[moves], new.array[moves])


def _visits(experts: Ints, nodes: Ints, quota: Floats, topology: Topology) -> tuple[Ints, Ints, Floats]:
    """Return each expert on each node that holds it, and its rows there: three ``[n]``. Experts ascend."""
    visits = experts * topology.num_nodes + nodes
    if not topology.in_order:
        order = np.argsort(visits, kind="stable")
        experts, nodes, quota, visits = experts[order], nodes[order], quota[order], visits[order]
    starts = np.flatnonzero(changes(visits))
    return experts[starts], nodes[starts], np.add.reduceat(quota, starts)


def _exchanged(own: Floats, have: Floats, compute: Floats, where: Ints) -> tuple[Floats, Floats]:
    """Return the rows that each rank (or node) receives and sends, ``[W]`` (or ``[N]``)."""
    # ``own`` has one number for each rank (or node); the others are of an expert on one that holds it, ``[n]``: rows
    # that come from there, rows that are computed there, and where that is.
    stay = np.minimum(have, compute)
    received: Any = np.bincount(where, compute - stay, minlength=len(own))
    return received, own - np.bincount(where, stay, minlength=len(own))


def _most(sources: Ints, destinations: Ints) -> int:
    """Return the most experts that any rank (or node) sends or receives."""
    if len(sources) == 0:
        return 0
    return int(max(np.bincount(sources).max(), np.bincount(destinations).max()))
