"""Predict a training step on all ranks of a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hecate.simulator.capture import Capture
from hecate.simulator.carried import Carried, Floats
from hecate.simulator.cluster import ClusterSpec
from hecate.simulator.program import (
    Compute,
    Item,
    RankSizes,
    Start,
    Symbols,
    Wait,
    depends_on_routing,
    program_of,
    rank_sizes,
)
from hecate.simulator.replay import LayerStep

# AdamW reads a parameter, its gradient and two states, and writes all but the gradient.
UPDATE_PASSES = 7


@dataclass(frozen=True, kw_only=True)
class PredictedSpan:
    """A collective: when the last rank began it, and when the last one had its result."""

    part: str
    operator: str
    begun: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of a step: seconds until the last rank has updated its parameters, and spans in their order.

    Seconds of ``compute``, and ``waited`` for collectives, are ``[W]``; bytes ``sent`` by each node are ``[N]``.
    """

    seconds: float
    compute: Floats
    waited: Floats
    sent: Floats
    spans: tuple[PredictedSpan, ...]


class Simulator:
    """Walks all ranks of a cluster, or of one of the groups on it, through a captured model.

    The other groups do the same at the same time, so none waits for another.
    """

    def __init__(self, capture: Capture, cluster: ClusterSpec) -> None:
        self.whole = cluster
        self.cluster = cluster.of_group(cluster.ranks // capture.groups)
        self.layers = [layer.id for layer in capture.layers]
        self.together = {layer.id: layer.sizes.together for layer in capture.layers}
        symbols: Symbols = {}
        self.parts = [(c.context.part, program_of(c, symbols)) for c in capture.graphs]

    def step(self, layers: Sequence[LayerStep], *, update: Floats | float = 0.0) -> Prediction:
        """Predict the step with this routing of each layer, in the order of the captured model's.

        ``update`` is bytes of parameters that each rank updates, ``[W]``; 0 leaves the optimizer out.
        """
        of = dict(zip(self.layers, layers, strict=True))
        topology = self.cluster.topology
        carried = {id: Carried(layer, topology, self.together[id]) for id, layer in of.items()}
        links = _Links(self.cluster, self.whole, carried)
        sizes = rank_sizes(self.layers, layers)
        clock, compute, free = (np.zeros(self.cluster.ranks) for _ in range(3))
        sent, spans = np.zeros(self.cluster.nodes), []
        for part, items in self.parts:
            ends: dict[int, Floats] = {}
            counts = {one.token for one in items if isinstance(one, Start) and one.collective.carries == "counts"}
            for item in items:
                if isinstance(item, Wait):
                    clock = np.maximum(clock, ends[item.token])
                    if item.token in counts:
                        clock = clock + self.cluster.plan + self.cluster.plan_rank * self.cluster.ranks
                    continue
                spent = self._seconds(item, sizes, links)
                clock, compute = clock + spent, compute + spent
                if isinstance(item, Start):
                    # A rank's collectives run in the order of their starts.
                    begun = np.maximum(free, clock)
                    free, leaving = links.run(item, begun)
                    ends[item.token] = free
                    sent += leaving
                    first, last = float(begun.max()), float(free.max())
                    spans.append(PredictedSpan(part=part, operator=item.operator, begun=first, ended=last))
        spent = UPDATE_PASSES * (np.zeros(self.cluster.ranks) + update) / self.cluster.memory_bytes
        clock, compute = clock + spent, compute + spent
        return Prediction(
            seconds=float(clock.max()), compute=compute, waited=clock - compute, sent=sent, spans=tuple(spans)
        )

    def _seconds(self, item: Item, sizes: RankSizes, links: _Links) -> Floats:
        """Return the compute time of every rank."""
        cluster = self.cluster
        if isinstance(item, Start):
            # A start copies the bytes that it sends.
            return cluster.start * links.takes_part(item) + 2 * links.packed(item) / cluster.memory_bytes
        assert isinstance(item, Compute)
        total = np.full(cluster.ranks, item.operators * cluster.operator)
        for operations, moved in item.fixed:
            total += max(operations / cluster.flops, moved / cluster.memory_bytes)
        for function in item.routed:
            routed_operations, routed_moved = function(sizes)
            longest = np.maximum(routed_operations / cluster.flops, routed_moved / cluster.memory_bytes)
            total = total + cluster.routed * longest
        return total


class _Links:
    """The links between ranks and between nodes, with the load of one step's collectives."""

    def __init__(self, cluster: ClusterSpec, whole: ClusterSpec, layers: Mapping[int, Carried]) -> None:
        self.cluster, self.whole, self.topology, self.layers = cluster, whole, cluster.topology, layers
        # When links out of and into nodes, and out of and into ranks, will have carried everything so far.
        self.busy = [np.zeros(cluster.ranks) for _ in range(4)]

    def run(self, start: Start, begun: Floats) -> tuple[Floats, Floats]:
        """Return when each rank, begun at ``begun``, has its result, ``[W]``, and the bytes that leave each node."""
        if self._leaves_group(start):
            return self._between_groups(start, begun)
        rounds = 0 if self._straight(start) else start.collective.ring_rounds
        if rounds:
            # Each rank needs all the others.
            begun = np.full_like(begun, begun.max())
        ended = begun + self._around(rounds, self.cluster.ranks)
        leaving = np.zeros(self.cluster.nodes)
        ended += self.cluster.latency * self.takes_part(start)
        crowded = self.cluster.crowded if start.collective.carries == "rows" else 1.0
        for matrix in self._sent(start):
            ended, sent = self._send(matrix * start.unit, ended, self.cluster.node_bytes * crowded)
            leaving += sent
        return ended, leaving

    def _leaves_group(self, start: Start) -> bool:
        return start.among != "group" and self.whole.ranks > self.cluster.ranks

    def _around(self, rounds: int, ranks: int) -> float:
        """Return the seconds that a collective around ranks takes beside its bytes; an all-reduce takes a tree."""
        hops = 2 * math.ceil(math.log2(ranks)) if rounds == 2 else rounds * (ranks - 1)
        return rounds * self.cluster.ring + hops * self.cluster.hop

    def _between_groups(self, start: Start, begun: Floats) -> tuple[Floats, Floats]:
        """Return what :meth:`run` does for an all-reduce over everyone, or over the twins of each rank."""
        cluster, whole, everyone = self.cluster, self.whole, start.among == "everyone"
        ranks = whole.ranks if everyone else whole.ranks // cluster.ranks
        # On CPUs gradients that all ranks have are added up inside nodes before they cross.
        parts = whole.nodes if everyone and whole.cpus else ranks
        # A ring enters each node once. That of twins is one for each rank of the group that is in a node.
        rings = 1 if everyone else cluster.gpus
        crossing = rings * 2 * (parts - 1) / parts * start.unit if whole.nodes > 1 else 0.0
        passed = 2 * (ranks - 1) / ranks * start.unit
        ready = begun.max() + self._around(2, ranks) + cluster.latency
        out, into, *inside = self.busy
        for link, seconds in (
            *((link, crossing / cluster.node_bytes) for link in (out, into)),
            *((link, passed / cluster.rank_bytes) for link in inside),
        ):
            link[:] = np.maximum(link, ready) + seconds
        ended = max(float(link.max()) for link in self.busy)
        return np.full_like(begun, ended), np.full(cluster.nodes, crossing)

    def takes_part(self, start: Start) -> Any:
        """Return which ranks send to others or receive from them, ``[W]``. Others spend nothing on the collective."""
        if self._leaves_group(start):
            return np.ones(self.cluster.ranks, dtype=bool)
        between = sum(self._sent(start), np.zeros((self.cluster.ranks,) * 2))
        return (between.sum(0) > between.diagonal()) | (between.sum(1) > between.diagonal())

    def packed(self, start: Start) -> Floats:
        """Return the bytes that every rank copies before it sends."""
        collective = start.collective
        if not depends_on_routing(collective):
            return np.full(self.cluster.ranks, start.unit)
        assert start.layer is not None
        carried = self.layers[start.layer]
        if collective.carries in ("rows", "tickets"):
            rows = carried.to_relays if collective.hops == 2 and not collective.homeward else carried.rows
            return rows.sum(0 if collective.homeward else 1) * start.unit
        if collective.carries == "replicas" and collective.role == "reduce":
            _, ranks = carried.layer.placement.pairs
            return np.bincount(ranks, minlength=self.cluster.ranks).astype(np.float64) * start.unit
        if collective.carries == "replicas":
            stages = carried.planned if collective.role == "gather" else carried.late
            sent: Floats = sum((stage.sum(1) for stage in stages), start=np.zeros(self.cluster.ranks))
            return sent * start.unit
        return np.asarray(carried.owned) * start.unit

    def _sent(self, start: Start) -> list[Floats]:
        """Return the units from each rank to each, ``[W, W]``, one matrix for each stage."""
        return self._straight(start) or self._matrices(start)

    def _matrices(self, start: Start) -> list[Floats]:
        """Return the matrices of :meth:`_sent` for a collective that :meth:`_straight` has none for."""
        size, collective = self.cluster.ranks, start.collective
        carried = self.layers[start.layer] if start.layer is not None else None
        if collective.ring_rounds:
            # In each round every rank passes on all parts but one. A sum is cut into a part for each rank; gathered
            # experts are padded to the rank that owns most.
            part = 1 / size if collective.ring_rounds == 2 else 1.0
            part *= max(carried.owned) if carried is not None else 1
            return [collective.ring_rounds * (size - 1) * part * np.roll(np.eye(size), 1, axis=1)]
        if collective.carries == "dense" and collective.role == "reduce":
            return [np.full((size, size), 1 / size)]
        if carried is None:
            raise LookupError(f"hecate: the simulator does not know how {collective.name} travels")
        if collective.carries == "tickets":
            return [carried.told]
        if collective.carries == "rows":
            stages = [carried.to_relays, carried.from_relays] if collective.hops == 2 else [carried.rows]
            return [stage.T for stage in reversed(stages)] if collective.homeward else stages
        if collective.carries == "replicas":
            if collective.role == "reduce":
                # First inside nodes, then between them.
                return [stage.T for stage in reversed(carried.all)]
            return carried.planned if collective.role == "gather" else carried.late
        if collective.carries == "experts" and collective.role == "reduce":
            # Gradients of all experts go to their owners.
            return [np.tile(np.asarray(carried.owned, dtype=np.float64), (size, 1))]
        raise LookupError(f"hecate: the simulator does not know how {collective.name} travels")

    def _straight(self, start: Start) -> list[Floats]:
        """Return the matrices of :meth:`_sent` for a collective that takes no ring on CPUs; none for others."""
        nodes, gpus, carries = self.cluster.nodes, self.cluster.gpus, start.collective.carries
        if self.cluster.cpus and carries == "counts":
            return [np.ones((nodes * gpus, nodes * gpus))]
        if self.cluster.cpus and carries == "bucket" and nodes > 1:
            # ``collectives.all_reduce_by_nodes``: parts to neighbours, parts of these across, and both back.
            neighbours = np.kron(np.eye(nodes), np.ones((gpus, gpus))) / gpus
            across = np.kron(np.ones((nodes, nodes)), np.eye(gpus)) / (gpus * nodes)
            return [neighbours, across, across, neighbours]
        return []

    def _send(self, sent: Floats, begun: Floats, node_bytes: float) -> tuple[Floats, Floats]:
        """Return when each rank has sent and received ``sent`` ``[W, W]``, and the bytes that leave each node.

        Two ranks exchange as soon as both have begun. A link serves transfers in the order in which they get ready.
        """
        topology = self.topology
        sources, destinations = np.nonzero(sent)
        size, ready = sent[sources, destinations], np.maximum(begun[sources], begun[destinations])
        nodes = topology.nodes
        inside = nodes[sources] == nodes[destinations]
        away = sources != destinations
        done = ready.copy()
        for places, chosen, rate, busy in (
            (nodes[sources], ~inside, node_bytes, self.busy[0]),
            (nodes[destinations], ~inside, node_bytes, self.busy[1]),
            (sources, inside & away, self.cluster.rank_bytes, self.busy[2]),
            (destinations, inside & away, self.cluster.rank_bytes, self.busy[3]),
        ):
            line = places[chosen]
            # The rest of an earlier collective goes first.
            served = _serve(line, np.maximum(ready[chosen], busy[line]), size[chosen] / rate)
            np.maximum.at(busy, line, served)
            done[chosen] = np.maximum(done[chosen], served)
        ended = begun.copy()
        np.maximum.at(ended, sources, done)
        np.maximum.at(ended, destinations, done)
        leaving: Any = np.bincount(nodes[sources[~inside]], size[~inside], minlength=topology.num_nodes)
        return ended, leaving


def _serve(places: Any, ready: Floats, seconds: Floats) -> Floats:
    """Return when each job is done, if every place serves its jobs one by one, the first that is ready first."""
    done = np.empty_like(ready)
    order = np.lexsort((ready, places))
    ends = np.flatnonzero(np.diff(places[order], append=-1))
    begin = 0
    for end in (ends + 1).tolist():
        jobs = order[begin:end]
        worked = np.cumsum(seconds[jobs])
        # Idle time so far is the most by which a job became ready after all work before it was done.
        done[jobs] = worked + np.maximum.accumulate(ready[jobs] - worked + seconds[jobs])
        begin = end
    return done
