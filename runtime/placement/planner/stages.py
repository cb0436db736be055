"""Plan transfers: which rank sends which expert to which rank, in at most two stages, so that all replicas arrive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement, changes
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class Stage:
    """Experts that travel at the same time, ordered by (source, destination, owner, expert).

    Attributes:
        experts: int64 ``[n]``.
        sources: the rank that has the expert by then, int64 ``[n]``.
        destinations: the rank that gets it, int64 ``[n]``.
    """

    experts: Ints
    sources: Ints
    destinations: Ints


@dataclass(frozen=True, eq=False)
class StageOfRank:
    """One stage seen from one rank.

    Attributes:
        leave, arrive: which of the experts at hand go out and come in, ordered by the other rank, int64.
        send, receive: how many go to and come from each rank, length W.
    """

    leave: Ints
    arrive: Ints
    send: list[int]
    receive: list[int]


@dataclass(frozen=True, eq=False)
class Travels:
    """How replicas travel, and what one rank has to do with that.

    Attributes:
        stages: of all ranks.
        replicas: experts that the rank holds and does not own, in slot order, int64 ``[K]``.
        leaving: own experts that others want, int64 ``[L]``.
        places: where these are among the own ones, int64 ``[L]``.
        there: each stage as experts travel; at hand are ``leaving``, and behind them ``replicas``.
        slots: each stage, at hand are the rank's slots; as gradients return, what arrived leaves.
        summed: slots that get parts of gradients: own experts, then replicas that pass them on, int64 ``[P]``.
    """

    stages: tuple[Stage, Stage]
    replicas: Ints
    leaving: Ints
    places: Ints
    there: tuple[StageOfRank, StageOfRank]
    slots: tuple[StageOfRank, StageOfRank]
    summed: Ints

    def experts_sent(self, *, homeward: bool) -> int:
        """Copies of experts that the rank sends; with ``homeward`` gradients of such."""
        return sum(sum(stage.receive if homeward else stage.send) for stage in self.there)


def travels_of(placement: Placement, rank: int, stages: tuple[Stage, Stage]) -> Travels:
    """What ``rank`` does in ``stages``, which bring replicas of ``placement``."""
    owners, slots = placement.owner_array, placement.slots_on(rank)
    replicas = slots[placement.owners.counts[rank] :]
    sent = np.concatenate([stage.experts[stage.sources == rank] for stage in stages])
    leaving = np.unique(sent[owners[sent] == rank])
    at_hand = np.concatenate([leaving, replicas])
    first, second = (_of_rank(slots, stage, rank, placement) for stage in stages)
    return Travels(
        stages=stages,
        replicas=replicas,
        leaving=leaving,
        places=places_of(leaving, np.flatnonzero(owners == rank), len(owners)),
        there=(_of_rank(at_hand, stages[0], rank, placement), _of_rank(at_hand, stages[1], rank, placement)),
        slots=(first, second),
        summed=np.unique(np.concatenate([first.leave, second.leave])),
    )


def _of_rank(at_hand: Ints, stage: Stage, rank: int, placement: Placement) -> StageOfRank:
    out, come = stage.sources == rank, stage.destinations == rank
    num_experts, world_size = len(placement.holders), placement.owners.world_size
    return StageOfRank(
        leave=places_of(stage.experts[out], at_hand, num_experts),
        arrive=places_of(stage.experts[come], at_hand, num_experts),
        send=np.bincount(stage.destinations[out], minlength=world_size).tolist(),
        receive=np.bincount(stage.sources[come], minlength=world_size).tolist(),
    )


def places_of(experts: Ints, among: Ints, num_experts: int) -> Ints:
    """Where each of ``experts`` is in ``among``."""
    where = np.zeros(num_experts, dtype=np.int64)
    where[among] = np.arange(len(among))
    return where[experts]


def stages_of(placement: Placement, topology: Topology) -> tuple[Stage, Stage]:
    """Between nodes first, then inside them: an expert crosses to a node once and fans out there.

    In each node the first holder in rank order receives the expert from its owner and passes it on; in the owner's
    node the owner does. So no rank gets an expert twice, and the number of copies that travel is the number of
    replicas, lambda * |C| in the paper's formula (section 2). On a single node the first stage is empty.
    """
    across, inside = hops(placement, topology)
    return _stage(placement, *across), _stage(placement, *inside)


Hops = tuple[Ints, Ints, Ints]


def hops(placement: Placement, topology: Topology) -> tuple[Hops, Hops]:
    """The same two stages in any order: experts, sources and destinations."""
    experts, ranks = placement.pairs
    owners = placement.owner_array[experts]
    if topology.num_nodes == 1:
        travels = np.flatnonzero(ranks != owners)
        nothing = np.zeros(0, dtype=np.int64)
        return (nothing, nothing, nothing), (experts[travels], owners[travels], ranks[travels])
    nodes = topology.nodes
    # The first holder of each expert on each node; on the owner's node the owner.
    visits = experts * topology.num_nodes + nodes[ranks]
    first, line = _runs(visits) if topology.in_order else _firsts(visits)
    leaders = np.where(nodes[ranks[first]] == nodes[owners[first]], owners[first], ranks[first])[line]
    leads = ranks == leaders
    across, inside = np.flatnonzero(leads & (ranks != owners)), np.flatnonzero(~leads)
    return (
        (experts[across], owners[across], ranks[across]),
        (experts[inside], leaders[inside], ranks[inside]),
    )


def _runs(values: Ints) -> tuple[Ints, Ints]:
    """Where each value of an ascending array begins, and the number of its run for every element."""
    begins = changes(values)
    return np.flatnonzero(begins), np.cumsum(begins) - 1


def _firsts(values: Ints) -> tuple[Ints, Ints]:
    """As :func:`_runs`, for values in any order."""
    _, first, line = np.unique(values, return_index=True, return_inverse=True)
    return first, line


def _stage(placement: Placement, experts: Ints, sources: Ints, destinations: Ints) -> Stage:
    order = np.lexsort((experts, placement.owner_array[experts], destinations, sources))
    return Stage(experts=experts[order], sources=sources[order], destinations=destinations[order])
