"""Materialize: decide which ranks get replicas of which experts, by the predicted time of a step."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner.balance import balance, balance_in_nodes, owners_only, shed_excess
from hecate.runtime.placement.planner.cost import CostModel, StepTime
from hecate.runtime.placement.planner.dealing import deal
from hecate.runtime.placement.topology import Topology

# Packing, adding up and a few microseconds of everything are not in the model. So replicas are worth it only if a
# step is predicted to take less than this part of one without them.
_WORTH = 0.95
# Filled slots may make a step this much longer by the prediction, since they pay where it is wrong.
_INSURED = 1.05
# A step may take this much longer with fewer slots than with all that there is memory for: the prediction overstates
# what a few more gain (docs/decisions.md).
_ALMOST = 1.03
# Even ranks are worth a look if they could save this part of what compute and rows take.
_MAY_GAIN = 0.03


class Recipe(NamedTuple):
    """How to make a placement.

    Attributes:
        spread: how many hot experts are spread, that is, get a copy on every node (every rank of a single node).
        in_nodes: ranks are evened out inside their nodes, by :func:`shed_excess`, and not across them.
        fills: slots that are left are filled, that is, get replicas, as long as all transfer stays hidden. They make
            a wrong prediction cheaper, but with more holders rows are not always dispatched better. None if both are
            to be tried; what was better is kept until both are tried again.
    """

    spread: int
    in_nodes: bool
    fills: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement and what it is predicted to take.

    Attributes:
        slots: most replicas that a rank could have.
        recipe: how it was made; None if nothing is replicated.
    """

    placement: Placement
    time: StepTime
    slots: int
    recipe: Recipe | None = None


def materialize_fastest(
    load: NDArray[np.integer],
    owners: Owners,
    costs: CostModel,
    *,
    slots: int,
    recipes: Sequence[Recipe] | None = None,
    fills: bool | None = None,
) -> Choice:
    """The fastest of a few placements, by :meth:`CostModel.step`.

    Rows cost time where they are computed and where they travel; replicas cost time where they travel. Tried are

    1. nothing;
    2. just enough replicas to even out the ranks, inside nodes or across them (:func:`shed_excess`);
    3. 1, 2, 4, ... hot experts on every node (every rank on a single node), so that their rows stay there, and then
       2. with the slots that are left.

    Exposed transfer is a cost and not a ban, unlike in the paper's rule (docs/decisions.md). Slots that are left get
    replicas while their transfer is hidden, unless that is predicted to cost more than 5 %.

    Args:
        load: expected rows per expert, ``[E]``.
        slots: m, most replicas on a rank.
        recipes: what to try; by default all of the list above.
        fills: of the recipes in the list above. With False nothing but the prediction counts.
    """
    rows, topology = load.tolist(), costs.topology
    owned = Placement.owned(owners)
    nothing = Choice(placement=owned, time=costs.step(rows, [[count] for count in rows], owned), slots=slots)
    if slots == 0 or owners.world_size == 1 or not any(rows):
        return nothing

    # Step 1: every recipe makes a proposal.
    hottest = _hottest(load, owners, topology, slots)
    if recipes is None:
        recipes = all_recipes(len(hottest), topology, fills)
    proposals = (_propose(rows, hottest, owners, topology, slots, recipe) for recipe in recipes)

    # Step 2: the best proposal with ranks evened out inside nodes, and the best with ranks evened out across them.
    winners = _best_of_each_way(rows, proposals, costs)

    # Step 3: those that beat nothing are timed again as their rows will be dispatched, unfilled and filled.
    promising = (proposal for seconds, proposal in winners if seconds < nothing.time.total)
    candidates = chain.from_iterable(_unfilled_and_filled(load, proposal, slots, costs) for proposal in promising)
    return _fastest(rows, candidates, costs, nothing)


def materialize_frugally(load: NDArray[np.integer], owners: Owners, costs: CostModel, *, slots: int) -> Choice:
    """:func:`materialize_fastest` with the fewest slots that come within 3 % of all ``slots``.

    Tried are ``slots`` and the powers of two below. If nothing is worth replicating with all of them, nothing is with
    fewer.

    Args:
        load: expected rows per expert, ``[E]``.
        slots: most replicas on a rank.
    """
    best = materialize_fastest(load, owners, costs, slots=slots)
    if best.recipe is None:
        return best
    for power in range((slots - 1).bit_length()):
        fewer = materialize_fastest(load, owners, costs, slots=2**power)
        if fewer.recipe is not None and fewer.time.total <= _ALMOST * best.time.total:
            return fewer
    return best


def _best_of_each_way(
    rows: list[int], proposals: Iterable[_Proposal], costs: CostModel
) -> list[tuple[float, _Proposal]]:
    """The best proposal for each value of ``in_nodes``, and the seconds of a step that splits rows as it says."""
    best: dict[bool, tuple[float, _Proposal]] = {}
    for proposal in proposals:
        way = proposal.recipe.in_nodes
        seconds = costs.step(rows, proposal.split, proposal.placement).total
        if way not in best or seconds < best[way][0]:
            best[way] = seconds, proposal
    return list(best.values())


def _unfilled_and_filled(
    load: NDArray[np.integer], proposal: _Proposal, slots: int, costs: CostModel
) -> Iterator[tuple[Recipe, Placement]]:
    """The proposal's placement, with its free slots filled or not, or both, as its recipe says.

    With each comes the recipe that makes just this one.
    """
    recipe = proposal.recipe
    if recipe.fills is None or not recipe.fills:
        yield recipe._replace(fills=False), proposal.placement
    if recipe.fills is None or recipe.fills:
        filled = _fill(load, proposal, slots, costs)
        # The same object if there was nothing to fill.
        if recipe.fills or filled is not proposal.placement:
            yield recipe._replace(fills=True), filled


def _fastest(
    rows: list[int], candidates: Iterable[tuple[Recipe, Placement]], costs: CostModel, nothing: Choice
) -> Choice:
    """The fastest candidate, of equals the last, if it beats ``nothing`` by 5 %. Filled ones may be 5 % slower."""
    best, least = nothing, nothing.time.total
    for recipe, placement in candidates:
        time = costs.step(rows, split_fastest(rows, placement, costs), placement)
        insured = time.total / _INSURED if recipe.fills else time.total
        if insured <= least and time.total < _WORTH * nothing.time.total:
            least = insured
            best = Choice(placement=placement, time=time, slots=nothing.slots, recipe=recipe)
    return best


def materialize_again(
    load: NDArray[np.integer], owners: Owners, costs: CostModel, *, slots: int, recipes: Sequence[Recipe]
) -> tuple[Placement, Recipe]:
    """The best of a few recipes, timed as each splits the rows itself: a fraction of :func:`materialize_fastest`.

    With one recipe nothing is compared. With several, nothing is replicated unless the best is faster than owners
    alone.

    Args:
        recipes: with the one of the last step first, which wins where others are no better.

    Returns:
        A placement, and the best recipe.
    """
    if slots == 0 or owners.world_size == 1:
        return Placement.owned(owners), recipes[0]
    rows, hottest = load.tolist(), _hottest(load, owners, costs.topology, slots)
    proposals = [_propose(rows, hottest, owners, costs.topology, slots, recipe) for recipe in recipes]
    best, least, alone = proposals[0], math.inf, sum(costs.owners_work(rows, owners))
    for proposal in proposals if len(proposals) > 1 else ():
        seconds = sum(costs.work(rows, proposal.split, proposal.placement))
        # Most of the others need not be looked at any further.
        if seconds < least:
            seconds += costs.exposed_seconds(proposal.placement)
        if seconds < least:
            best, least = proposal, seconds
    if len(proposals) > 1 and least >= alone:
        return Placement.owned(owners), best.recipe
    return _fill(load, best, slots, costs) if best.recipe.fills else best.placement, best.recipe


def seconds_of(
    load: NDArray[np.integer], owners: Owners, costs: CostModel, *, slots: int, recipe: Recipe | None
) -> float:
    """Predicted seconds of a step with the placement that a recipe makes, unfilled; None for owners alone."""
    rows = load.tolist()
    if recipe is None:
        return sum(costs.owners_work(rows, owners))
    proposal = _propose(rows, _hottest(load, owners, costs.topology, slots), owners, costs.topology, slots, recipe)
    return costs.step(rows, proposal.split, proposal.placement).total


def split_fastest(rows: list[int], placement: Placement, costs: CostModel) -> list[list[int]]:
    """Rows of each expert on each of its holders: the fastest of three ways, by :meth:`CostModel.work`.

    Fewest rows between nodes (:func:`balance_in_nodes`); even ranks (:func:`balance`), on two nodes only if that may
    save 3 %; or owners alone: many nodes, or a load other than the expected one. A single node's ranks are made even.

    Args:
        rows: of each expert, length E.
    """
    topology = costs.topology
    if topology.num_nodes == 1 or placement.num_replicas == 0:
        return balance(rows, placement, topology)
    best = balance_in_nodes(rows, placement, topology)
    compute, travel = costs.work(rows, best, placement)
    least = compute + travel
    # On two nodes no row crosses that need not, so others can make ranks even, and no more. With a third one, rows of
    # a node without a holder may go to the node with less to receive.
    may_gain = compute - costs.compute(sum(rows) / topology.world_size)
    if topology.num_nodes > 2 or may_gain > _MAY_GAIN * least:
        split = balance(rows, placement, topology)
        seconds = sum(costs.work(rows, split, placement))
        if seconds < least:
            best, least = split, seconds
    # Where owners compute all rows already, both are the same but for rounding.
    faster = sum(costs.owners_work(rows, placement.owners)) < least * (1 - 1e-9)
    return owners_only(rows, placement) if faster else best


def all_recipes(most: int, topology: Topology, fills: bool | None = None) -> list[Recipe]:
    """0, 1, 2, 4, ... and ``most`` hot experts on every node, both ways to even out."""
    spreads = sorted({0, most, *(2**power for power in range(most.bit_length()))})
    return [Recipe(spread, way, fills) for spread in spreads for way in _ways(topology)]


def near_recipes(recipe: Recipe, topology: Topology, turn: int, count: int = 1) -> list[Recipe]:
    """``recipe`` and ``count`` of its neighbours, other ones in every turn; all fill slots alike.

    Neighbours have one or two hot experts more or fewer, or the other way to even out.
    """
    near = [recipe._replace(spread=recipe.spread + more) for more in (-1, 1, -2, 2) if recipe.spread + more >= 0]
    near += [recipe._replace(in_nodes=way) for way in _ways(topology) if way != recipe.in_nodes]
    return [recipe, *(near[(count * turn + index) % len(near)] for index in range(min(count, len(near))))]


def _ways(topology: Topology) -> tuple[bool, ...]:
    return (False,) if topology.num_nodes == 1 else (False, True)


def _hottest(load: NDArray[np.integer], owners: Owners, topology: Topology, slots: int) -> list[int]:
    """Experts with rows, in the order in which they should be put on every node; as many as slots may take.

    Rows leave every node for the one whose experts are wanted most, so its hottest expert is next.
    """
    # An expert needs no copy in its own group, and all groups take turns.
    groups = _groups(topology)
    most = -(-slots * min(map(len, groups)) * len(groups) // (len(groups) - 1))
    order: list[int] = np.argsort(-load, kind="stable")[: np.count_nonzero(load)].tolist()
    if topology.num_nodes == 1:
        return order[:most]
    rows, wanted = load.tolist(), [0] * topology.num_nodes
    waiting: list[deque[int]] = [deque() for _ in wanted]
    for expert in order:
        node = topology.node_of[owners.ranks[expert]]
        wanted[node] += rows[expert]
        waiting[node].append(expert)
    queue = [(-count, node) for node, count in enumerate(wanted) if count]
    heapq.heapify(queue)
    chosen: list[int] = []
    while queue and len(chosen) < most:
        count, node = heapq.heappop(queue)
        chosen.append(waiting[node].popleft())
        if waiting[node]:
            heapq.heappush(queue, (count + rows[chosen[-1]], node))
    return chosen


def _groups(topology: Topology) -> Sequence[tuple[int, ...]]:
    """The nodes; on a single node the ranks."""
    return topology.members if topology.num_nodes > 1 else tuple((rank,) for rank in range(topology.world_size))


@dataclass(frozen=True)
class _Proposal:
    """What a recipe makes of a load.

    Attributes:
        rows: of each expert.
        replicas: the ranks beside the owner that hold each expert.
        free: slots that are left on each rank.
        have: for each rank its rows of each expert that it holds.
    """

    recipe: Recipe
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
        holders, split = self.placement.holders, [[count] for count in self.rows]
        for expert, more in enumerate(self.replicas):
            if more:
                split[expert] = [self.have[rank].get(expert, 0) for rank in holders[expert]]
        return split


def _propose(
    rows: list[int], hottest: list[int], owners: Owners, topology: Topology, slots: int, recipe: Recipe
) -> _Proposal:
    """First the hot experts on every node; then, with the slots that are left, even ranks."""
    replicas: list[set[int]] = [set() for _ in rows]
    free = [slots] * owners.world_size
    _spread(rows, hottest[: recipe.spread], owners, _groups(topology), replicas, free)
    have = shed_excess(rows, owners, replicas, free, topology if recipe.in_nodes else None)
    return _Proposal(recipe, rows, owners, replicas, free, have)


def _fill(load: NDArray[np.integer], proposal: _Proposal, slots: int, costs: CostModel) -> Placement:
    """Add replicas in free slots, as many as can travel in the hidden time; the proposal's own placement if none.

    They cost nothing by the prediction, and make a wrong one cheaper. First all free slots are filled; if not all of
    that is hidden, one of every rank is left free, then two, and so on.
    """
    hidden, topology = costs.rates.hidden_seconds, costs.topology
    if hidden == 0:
        return proposal.placement
    # On many nodes filling takes time, and is mostly in vain.
    if topology.num_nodes > 1 and costs.replica_seconds(proposal.placement) >= hidden:
        return proposal.placement
    experts = np.argsort(-load, kind="stable")[: np.count_nonzero(load)].tolist()
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
        deal(proposal.rows, experts[: sum(map(len, free))], proposal.owners, replicas, free, topology)
        more = Placement.with_replicas(proposal.owners, replicas)
        if costs.replica_seconds(more) <= hidden:
            return more
    return proposal.placement


def _spread(
    rows: list[int],
    experts: list[int],
    owners: Owners,
    groups: Sequence[tuple[int, ...]],
    replicas: list[set[int]],
    free: list[int],
) -> None:
    """Add a replica of each expert in every group but its owner's, on the rank with a free slot and fewest rows.

    At first a rank's rows are those of the experts that it owns. Each replica takes an even share from the owner.
    """
    if not experts:
        return
    expected: list[float] = [*owners.rows(rows)]
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
