"""Plan transfers: which rank sends which expert to which rank, in at most two stages, so that all replicas arrive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement, changes
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class Stage:
    """Experts that travel at the same time, ordered by (source, destination, owner, expert): int64 ``[n]`` each."""

    experts: Ints
    sources: Ints  # the rank that has the expert by then
    destinations: Ints  # the rank that gets it


@dataclass(frozen=True, eq=False)
class StageOfRank:
    """A stage seen from one rank."""

    # Which of the experts at hand go out and come in, ordered by the other rank, int64.
    leave: Ints
    arrive: Ints
    # How many go to and come from each rank, length W.
    send: list[int]
    receive: list[int]


@dataclass(frozen=True, eq=False)
class Parts:
    """Gradients that come back to a rank in one stage, with how they are added up."""

    order: Ints  # the parts slot by slot, those of one slot as they come, by rank: int64 ``[m]``
    begins: Ints  # where those of each slot that gets any begin, and the last end, in ``order``: int64 ``[P + 1]``
    rounds: tuple[int, ...]  # from :func:`rounds_of`
    passed_on: Ints  # positions of sums among the gradients that the rank sends in this stage: int64 ``[q]``
    totals: Ints  # which of the sums these are, int64 ``[q]``

    @classmethod
    def of(cls, stage: StageOfRank, summed: Ints, slots: int) -> Parts:
        """Return the parts in ``stage``, by which experts came, where ``summed`` of ``slots`` slots get parts."""
        where = np.full(slots, -1)
        where[summed] = np.arange(len(summed))
        lengths = np.bincount(where[stage.leave], minlength=len(summed))
        begins = np.zeros(len(summed) + 1, dtype=np.int64)
        np.cumsum(lengths, out=begins[1:])
        # A replica that got parts leaves with its sum.
        leaves_with = where[stage.arrive]
        passed_on = np.flatnonzero(leaves_with >= 0)
        return cls(
            order=np.argsort(stage.leave, kind="stable"),
            begins=begins,
            rounds=rounds_of(lengths),
            passed_on=passed_on,
            totals=leaves_with[passed_on],
        )


@dataclass(frozen=True, eq=False)
class Travels:
    """The travels of a placement's replicas, and one rank's part in them. Worked out once; not to be written to."""

    placement: Placement
    rank: int
    stages: tuple[Stage, Stage]  # of all ranks

    @cached_property
    def replicas(self) -> Ints:
        """Experts that the rank holds and does not own, in slot order, int64 ``[K]``."""
        return self.placement.replicas_on(self.rank)

    @cached_property
    def leaving(self) -> Ints:
        """Own experts of which others need replicas, int64 ``[L]``."""
        sent = np.concatenate([stage.experts[stage.sources == self.rank] for stage in self.stages])
        return np.unique(sent[self.placement.owner_array[sent] == self.rank])

    @cached_property
    def places(self) -> Ints:
        """Positions of :attr:`leaving` among the own experts, int64 ``[L]``."""
        # Own experts are the first slots.
        return places_of(self.leaving, self.placement.slots_on(self.rank), len(self.placement.holders))

    @cached_property
    def there(self) -> tuple[StageOfRank, StageOfRank]:
        """Stages as experts travel; at hand are :attr:`leaving`, and behind them :attr:`replicas`."""
        return self._seen_from(np.concatenate([self.leaving, self.replicas]))

    @cached_property
    def slots(self) -> tuple[StageOfRank, StageOfRank]:
        """Stages with the rank's slots at hand; as gradients return, a slot that arrived leaves."""
        return self._seen_from(self.placement.slots_on(self.rank))

    @cached_property
    def summed(self) -> Ints:
        """Slots that get parts of gradients: own experts, then replicas that pass them on, int64 ``[P]``."""
        gets = np.zeros(len(self.placement.slots_on(self.rank)), dtype=bool)
        for stage in self.slots:
            gets[stage.leave] = True
        return np.flatnonzero(gets)

    @cached_property
    def parts(self) -> tuple[Parts, Parts]:
        """Gradients that come back in each stage of :attr:`slots`."""
        slots = len(self.placement.slots_on(self.rank))
        first, second = (Parts.of(stage, self.summed, slots) for stage in self.slots)
        return first, second

    def prepare(self) -> None:
        """Work out all arrays that a step asks for."""
        _ = self.places, self.there, self.parts

    def experts_sent(self, *, homeward: bool) -> int:
        """Return how many copies of experts the rank sends; with ``homeward`` how many gradients of replicas."""
        if homeward:
            return sum(sum(stage.receive) for stage in self.slots)
        return sum(sum(stage.send) for stage in self.there)

    def _seen_from(self, at_hand: Ints) -> tuple[StageOfRank, StageOfRank]:
        first, second = (_of_rank(at_hand, stage, self.rank, self.placement) for stage in self.stages)
        return first, second


def _of_rank(at_hand: Ints, stage: Stage, rank: int, placement: Placement) -> StageOfRank:
    num_experts, world_size = len(placement.holders), placement.owners.world_size
    if not len(stage.experts):
        # On a single node nothing crosses.
        return StageOfRank(stage.experts, stage.experts, [0] * world_size, [0] * world_size)
    out, come = stage.sources == rank, stage.destinations == rank
    return StageOfRank(
        leave=places_of(stage.experts[out], at_hand, num_experts),
        arrive=places_of(stage.experts[come], at_hand, num_experts),
        send=np.bincount(stage.destinations[out], minlength=world_size).tolist(),
        receive=np.bincount(stage.sources[come], minlength=world_size).tolist(),
    )


def rounds_of(lengths: Ints) -> tuple[int, ...]:
    """Return how many slots have more than 0 parts, more than 1 and so on, from the number of parts of each.

    >>> rounds_of(np.array([2, 0, 1]))
    (2, 1)
    """
    at_least = np.bincount(lengths)[::-1].cumsum()[::-1]
    return tuple(at_least[1:].tolist())


def places_of(experts: Ints, among: Ints, num_experts: int) -> Ints:
    """Return the position of each of ``experts`` in ``among``."""
    where = np.zeros(num_experts, dtype=np.int64)
    where[among] = np.arange(len(among))
    return where[experts]


def stages_of(placement: Placement, topology: Topology) -> tuple[Stage, Stage]:
    """Return the stages, between nodes and then inside them: an expert crosses to a node once and fans out there.

    The first holder in a node, in the owner's node the owner, passes the expert on. So no rank gets an expert twice,
    and as many copies travel as there are replicas: lambda * |C| in the paper's formula (section 2).
    """
    across, inside = hops(placement, topology)
    return _stage(placement, *across), _stage(placement, *inside)


Hops = tuple[Ints, Ints, Ints]


def hops(placement: Placement, topology: Topology) -> tuple[Hops, Hops]:
    """Return the stages of :func:`stages_of` in any order: experts, sources and destinations of each."""
    experts, ranks = placement.pairs
    owners = placement.owner_array[experts]
    if topology.num_nodes == 1:
        travels = np.flatnonzero(ranks != owners)
        nothing = np.zeros(0, dtype=np.int64)
        return (nothing, nothing, nothing), (experts[travels], owners[travels], ranks[travels])
    nodes = topology.nodes
    # Leaders are the first holder of each expert on each node; on the owner's node the owner.
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
    """Return where each value of an ascending array begins, and the number of its run for every element."""
    begins = changes(values)
    return np.flatnonzero(begins), np.cumsum(begins) - 1


def _firsts(values: Ints) -> tuple[Ints, Ints]:
    _, first, line = np.unique(values, return_index=True, return_inverse=True)
    return first, line


def _stage(placement: Placement, experts: Ints, sources: Ints, destinations: Ints) -> Stage:
    order = np.lexsort((experts, placement.owner_array[experts], destinations, sources))
    return Stage(experts=experts[order], sources=sources[order], destinations=destinations[order])
