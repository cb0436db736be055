"""Materialize: decide which ranks get replicas of which experts, by the predicted time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner.balance import balance, balance_in_nodes, owners_only
from hecate.runtime.placement.planner.cost import CostModel, StepTime
from hecate.runtime.placement.planner.paper import deal
from hecate.runtime.placement.planner.recipes import Proposal, Recipe, all_recipes, hottest_of, propose

# Packing, adding up and a few microseconds of everything are not in the model. So replicas are worth it only if a
# step is predicted to take less than this part of one without them.
_WORTH = 0.95
# Filled slots may make a step this much longer by the prediction, since they pay where it is wrong.
_INSURED = 1.05
# A step may take this much longer with fewer slots than with all that there is memory for: the prediction overstates
# what a few more gain (docs/decisions.md).
_ALMOST = 1.03
# Even ranks are compared if they could save this part of the seconds of compute and rows.
_MAY_GAIN = 0.03


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement and its predicted time."""

    placement: Placement
    time: StepTime
    slots: int  # most replicas that a rank could have
    recipe: Recipe | None = None  # None if nothing is replicated


def materialize_fastest(
    load: NDArray[np.integer],
    owners: Owners,
    costs: CostModel,
    *,
    slots: int,
    recipes: Sequence[Recipe] | None = None,
    fills: bool | None = None,
) -> Choice:
    """Return the fastest placement by :meth:`CostModel.step`, with at most ``slots`` replicas on a rank.

    It tries nothing, just enough replicas to even out the ranks, and 1, 2, 4, ... hot experts on every node, each
    evened out with the slots that are left; or the given ``recipes``. Exposed transfer is a cost and not a ban,
    unlike in the paper's rule (docs/decisions.md). Slots that are left get replicas while their transfer is hidden,
    unless that is predicted to cost more than 5 %; with ``fills=False`` nothing but the prediction counts.
    """
    rows, topology = load.tolist(), costs.topology
    owned = Placement.owned(owners)
    nothing = Choice(placement=owned, time=costs.step(rows, [[count] for count in rows], owned), slots=slots)
    if slots == 0 or owners.world_size == 1 or not any(rows):
        return nothing

    # Step 1: every recipe makes a proposal.
    hottest = hottest_of(load, owners, topology, slots)
    if recipes is None:
        recipes = all_recipes(len(hottest), topology, fills)
    proposals = (propose(rows, hottest, owners, topology, slots, recipe) for recipe in recipes)

    # Step 2: the best proposal with ranks evened out inside nodes, and the best with ranks evened out across them.
    winners = _best_of_each_way(rows, proposals, costs)

    # Step 3: those that beat nothing are timed again as their rows will be dispatched, unfilled and filled.
    promising = (proposal for seconds, proposal in winners if seconds < nothing.time.total)
    candidates = chain.from_iterable(_unfilled_and_filled(load, proposal, slots, costs) for proposal in promising)
    return _fastest(rows, candidates, costs, nothing)


def materialize_frugally(load: NDArray[np.integer], owners: Owners, costs: CostModel, *, slots: int) -> Choice:
    """Materialize as :func:`materialize_fastest` does, with the fewest slots that come within 3 % of all ``slots``.

    ``slots`` and the powers of two below are tried.
    """
    best = materialize_fastest(load, owners, costs, slots=slots)
    if best.recipe is None:
        # Nothing is worth replicating with fewer slots either.
        return best
    for power in range((slots - 1).bit_length()):
        fewer = materialize_fastest(load, owners, costs, slots=2**power)
        if fewer.recipe is not None and fewer.time.total <= _ALMOST * best.time.total:
            return fewer
    return best


def _best_of_each_way(
    rows: list[int], proposals: Iterable[Proposal], costs: CostModel
) -> list[tuple[float, Proposal]]:
    """Return the best proposal for each value of ``in_nodes``, with the seconds of a step with its split."""
    best: dict[bool, tuple[float, Proposal]] = {}
    for proposal in proposals:
        way = proposal.recipe.in_nodes
        seconds = costs.step(rows, proposal.split, proposal.placement).total
        if way not in best or seconds < best[way][0]:
            best[way] = seconds, proposal
    return list(best.values())


def _unfilled_and_filled(
    load: NDArray[np.integer], proposal: Proposal, slots: int, costs: CostModel
) -> Iterator[tuple[Recipe, Placement]]:
    """Yield the proposal's placement, free slots filled or not or both, each with the recipe that makes just this."""
    recipe = proposal.recipe
    if recipe.fills is None or not recipe.fills:
        yield recipe._replace(fills=False), proposal.placement
    if recipe.fills is None or recipe.fills:
        filled = _fill(load, proposal, slots, costs)
        # It is the same object if there was nothing to fill.
        if recipe.fills or filled is not proposal.placement:
            yield recipe._replace(fills=True), filled


def _fastest(
    rows: list[int], candidates: Iterable[tuple[Recipe, Placement]], costs: CostModel, nothing: Choice
) -> Choice:
    """Return the fastest candidate, of equals the last, if it beats ``nothing`` by 5 %; filled ones may lose 5 %."""
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
    """Return the best of a few recipes, each timed with its own split: a fraction of :func:`materialize_fastest`.

    The first of ``recipes`` wins where others are no better. With one recipe nothing is compared; with several,
    nothing is replicated unless the best is faster than owners alone.
    """
    if slots == 0 or owners.world_size == 1:
        return Placement.owned(owners), recipes[0]
    rows, hottest = load.tolist(), hottest_of(load, owners, costs.topology, slots)
    proposals = [propose(rows, hottest, owners, costs.topology, slots, recipe) for recipe in recipes]
    best, least, alone = proposals[0], math.inf, sum(costs.owners_work(rows, owners))
    for proposal in proposals if len(proposals) > 1 else ():
        seconds = sum(costs.work(rows, proposal.split, proposal.placement))
        # Most of the others are slower already without their exposed transfer.
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
    """Return the predicted seconds of a step with a recipe's placement, unfilled; None stands for owners alone."""
    rows = load.tolist()
    if recipe is None:
        return sum(costs.owners_work(rows, owners))
    proposal = propose(rows, hottest_of(load, owners, costs.topology, slots), owners, costs.topology, slots, recipe)
    return costs.step(rows, proposal.split, proposal.placement).total


def split_fastest(rows: list[int], placement: Placement, costs: CostModel) -> list[list[int]]:
    """Return the rows of each expert on its holders: the fastest of three ways, by :meth:`CostModel.work`.

    The ways are fewest rows between nodes (:func:`balance_in_nodes`); even ranks (:func:`balance`), on two nodes only
    if that may save 3 %; and owners alone, for many nodes, or a load other than the expected one.
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


def _fill(load: NDArray[np.integer], proposal: Proposal, slots: int, costs: CostModel) -> Placement:
    """Add replicas in free slots, as many as can travel in the hidden time; the proposal's own placement if none."""
    hidden, topology = costs.rates.hidden_seconds, costs.topology
    if hidden == 0:
        return proposal.placement
    # On many nodes filling takes time, and is mostly in vain.
    if topology.num_nodes > 1 and costs.replica_seconds(proposal.placement) >= hidden:
        return proposal.placement
    experts = np.argsort(-load, kind="stable")[: np.count_nonzero(load)].tolist()
    # First all free slots; if not all of that is hidden, one of every rank is left free, then two, and so on.
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
