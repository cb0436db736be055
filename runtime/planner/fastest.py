"""Sparse materialization by predicted time: which experts, how many replicas, on which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.owners import Owners
from hecate.runtime.planner.balance import balance, shed_excess
from hecate.runtime.planner.cost import Rates, Sizes, StepTime, step_time, transfer_time
from hecate.runtime.planner.dealing import deal
from hecate.runtime.planner.placement import Ints, Placement, Topology

# Packing, adding up and a few microseconds of everything are not in the model; replicas must gain more than that.
_WORTH = 0.95


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement and what it is predicted to take.

    Attributes:
        spread: how many of the hottest experts were put on every node; None if nothing is replicated.
    """

    placement: Placement
    time: StepTime
    spread: int | None = None


def materialize_fastest(
    load: NDArray[np.integer],
    owners: Owners,
    topology: Topology,
    *,
    slots: int,
    sizes: Sizes,
    rates: Rates,
    spreads: Sequence[int] | None = None,
) -> Choice:
    """The fastest of a few placements, by :func:`step_time`.

    Rows cost time where they are computed and where they travel; replicas cost time where they travel. Tried are

    1. nothing;
    2. just enough replicas to even out the ranks (:func:`shed_excess`);
    3. the 1, 2, 4, ... hottest experts on every node (every rank on a single node), so that their rows stay
       there, and then 2. with the slots that are left.

    Exposed transfer is a cost and not a ban, unlike in the paper's rule (docs/decisions.md). Slots that are left get
    replicas while their transfer is hidden.

    Args:
        load: expected rows per expert, ``[E]``.
        slots: m, most replicas on a rank.
        spreads: how many of the hottest experts to try on every node; by default all of the list above.
    """
    rows = load.tolist()
    owned = Placement.owned(owners)
    nothing = Choice(
        placement=owned, time=step_time(rows, [[count] for count in rows], owned, topology, sizes, rates)
    )
    if slots == 0 or owners.world_size == 1 or not any(rows):
        return nothing
    hottest = _hottest(load)
    most = min(len(hottest), slots * min(map(len, _groups(topology))))
    tried = []
    for spread in spread_counts(most) if spreads is None else sorted({min(spread, most) for spread in spreads}):
        proposal = _propose(rows, hottest, owners, topology, slots, spread)
        time = step_time(rows, proposal.split, proposal.placement, topology, sizes, rates)
        tried.append((time.total, spread, proposal))
    total, spread, proposal = min(tried, key=lambda one: one[:2])
    if total >= nothing.time.total:
        return nothing
    # The winner is timed again as its rows will be dispatched, and with its free slots filled.
    best = nothing
    filled = _fill_hidden(rows, hottest, proposal, topology, slots, sizes, rates)
    for placement in (proposal.placement,) if filled is proposal.placement else (proposal.placement, filled):
        time = step_time(rows, balance(rows, placement, topology), placement, topology, sizes, rates)
        if time.total <= best.time.total and time.total < _WORTH * nothing.time.total:
            best = Choice(placement=placement, time=time, spread=spread)
    return best


def materialize_spread(
    load: NDArray[np.integer],
    owners: Owners,
    topology: Topology,
    *,
    slots: int,
    sizes: Sizes,
    rates: Rates,
    spread: int,
) -> Placement:
    """The placement of :func:`materialize_fastest` when the best ``spread`` is known: nothing is compared."""
    rows, hottest = load.tolist(), _hottest(load)
    proposal = _propose(rows, hottest, owners, topology, slots, spread)
    return _fill_hidden(rows, hottest, proposal, topology, slots, sizes, rates)


def _hottest(load: NDArray[np.integer]) -> list[int]:
    """Experts with rows, most first."""
    order: list[int] = np.argsort(-load, kind="stable")[: np.count_nonzero(load)].tolist()
    return order


def _groups(topology: Topology) -> Sequence[tuple[int, ...]]:
    """The nodes; on a single node the ranks."""
    return topology.members if topology.num_nodes > 1 else tuple((rank,) for rank in range(topology.world_size))


@dataclass(frozen=True)
class _Proposal:
    """The replicas of each expert, the slots that are left on each rank, and each rank's rows of each expert."""

    rows: list[int]
    owners: Owners
    replicas: list[set[int]]
    free: list[int]
    have: list[dict[int, int]]

    @cached_property
    def placement(self) -> Placement:
        return Placement.with_replicas(self.owners, self.replicas)

    @cached_property
    def split(self) -> list[list[int]]:
        """The rows of each expert on each of its holders, in the order of ``placement.holders``."""
        return [
            [self.have[rank].get(expert, 0) for rank in ranks] if len(ranks) > 1 else [self.rows[expert]]
            for expert, ranks in enumerate(self.placement.holders)
        ]


def _propose(
    rows: list[int], hottest: list[int], owners: Owners, topology: Topology, slots: int, spread: int
) -> _Proposal:
    replicas: list[set[int]] = [set() for _ in rows]
    free = [slots] * owners.world_size
    _spread(rows, hottest[:spread], owners, _groups(topology), replicas, free)
    have = shed_excess(rows, owners, replicas, free)
    return _Proposal(rows, owners, replicas, free, have)


def _fill_hidden(
    rows: list[int],
    experts: list[int],
    proposal: _Proposal,
    topology: Topology,
    slots: int,
    sizes: Sizes,
    rates: Rates,
) -> Placement:
    """Replicas that travel for nothing: they make a wrong prediction cheaper. As many slots as stay hidden."""
    if rates.hidden == 0:
        return proposal.placement
    # On many nodes filling takes time, and is mostly in vain.
    if topology.num_nodes > 1 and transfer_time(proposal.placement, topology, sizes, rates) >= rates.hidden:
        return proposal.placement
    for kept in range(slots):
        # Every rank's first free slot comes before any rank's second.
        free = [
            [rank for turn in range(slots) for rank in ranks if proposal.free[rank] - kept > turn]
            for ranks in topology.members
        ]
        if not any(free):
            break
        replicas = list(map(set, proposal.replicas))
        # Each slot takes the expert with most rows per holder, so colder experts have no turn.
        deal(rows, experts[: sum(map(len, free))], proposal.owners, replicas, free, topology)
        more = Placement.with_replicas(proposal.owners, replicas)
        if transfer_time(more, topology, sizes, rates) <= rates.hidden:
            return more
    return proposal.placement


def spread_counts(most: int) -> list[int]:
    """0, 1, 2, 4, ... and ``most``."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def _spread(
    rows: list[int],
    experts: list[int],
    owners: Owners,
    groups: Sequence[tuple[int, ...]],
    replicas: list[set[int]],
    free: list[int],
) -> None:
    """One copy of each expert in every group, on the rank with fewest expected rows that has a free slot."""
    if not experts:
        return
    expected = [0.0] * owners.world_size
    for expert, owner in enumerate(owners.ranks):
        expected[owner] += rows[expert]
    for expert in experts:
        owner = owners.ranks[expert]
        share = rows[expert] / len(groups)
        for ranks in groups:
            if owner in ranks:
                continue
            open_ranks = [rank for rank in ranks if free[rank]]
            if open_ranks:
                rank = min(open_ranks, key=lambda rank: (expected[rank], rank))
                replicas[expert].add(rank)
                free[rank] -= 1
                expected[rank] += share
                expected[owner] -= share


def quota_matrix(split: list[list[int]], placement: Placement) -> Ints:
    """The rows of each expert on its holders as int64 ``[E, W]``."""
    quotas = np.zeros((len(split), placement.owners.world_size), dtype=np.int64)
    quotas[placement.pairs] = np.fromiter(chain.from_iterable(split), dtype=np.int64)
    return quotas
