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
