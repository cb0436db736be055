"""Which experts are replicated where: the paper's rule, and the choice by predicted time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import (
    Budget,
    CostModel,
    LayerSizes,
    Rates,
    expected_load,
    local_split,
    materialize,
    materialize_again,
    materialize_fastest,
    split_fastest,
    stages_of,
    steady_steps,
)
from hecate.runtime.placement.planner.balance import balance
from hecate.runtime.placement.topology import Topology
from tests.runtime.placement.planner.cases import FAST, SIZES, Case, cases, costs_of, placements, rates

budgets = st.builds(Budget, overlap_degree=st.integers(0, 14), slots=st.integers(0, 5))


def check_placement(placement: Placement, case: Case, slots: int) -> None:
    """A superset of the owners, no expert twice on a rank, at most ``slots`` replicas on a rank, none for nothing."""
    assert placement.owners == case.owners
    for owner, ranks in zip(case.owners.ranks, placement.holders, strict=True):
        assert owner in ranks
        assert list(ranks) == sorted(set(ranks))
    replicas = placement.matrix == 1
    assert replicas.sum(0).max() <= slots
    assert not replicas[case.load == 0].any()
    assert placement.num_replicas == replicas.sum()


@FAST
@given(cases(), budgets)
def test_the_papers_rule_stays_in_its_budget(case: Case, budget: Budget) -> None:
    placement = materialize(case.load, case.owners, case.topology, budget)
    check_placement(placement, case, budget.slots)
    assert (placement.matrix == 1).any(1).sum() <= budget.overlap_degree
    assert placement == materialize(case.load.copy(), case.owners, case.topology, budget)


@FAST
@given(cases(), st.integers(0, 5), rates)
def test_the_fastest_stays_in_its_budget_and_is_never_predicted_slower(case: Case, slots: int, rates: Rates) -> None:
    costs = costs_of(case.topology, rates)
    choice = materialize_fastest(case.load, case.owners, costs, slots=slots)
    check_placement(choice.placement, case, slots)
    rows, nothing = case.load.tolist(), Placement.owned(case.owners)
    static = costs.step(rows, balance(rows, nothing, case.topology), nothing)
    assert choice.time.total <= static.total
    # What is predicted is what will be dispatched.
    split = split_fastest(rows, choice.placement, costs)
    assert choice.time == costs.step(rows, split, choice.placement)
    if choice.recipe is not None:
        # What is made in the steps between two comparisons is what was compared.
        again = materialize_again(case.load, case.owners, costs, slots=slots, recipes=[choice.recipe])
        assert again == (choice.placement, choice.recipe)
    again = materialize_fastest(case.load.copy(), case.owners, costs, slots=slots)
    assert (choice.placement, choice.time) == (again.placement, again.time)


@FAST
@given(cases(), st.integers(1, 12))
def test_more_slots_never_worsen_the_most_rows_per_holder(case: Case, overlap: int) -> None:
    plans = [
        materialize(case.load, case.owners, case.topology, Budget(overlap_degree=overlap, slots=slots))
        for slots in range(6)
    ]
    bounds = [max(rows / len(ranks) for rows, ranks in zip(case.load, p.holders, strict=True)) for p in plans]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(bounds))


PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)


@FAST
@given(cases(), st.permutations(range(12)), st.permutations(PRIMES), st.integers(0, 5))
def test_numbers_of_experts_do_not_matter(case: Case, order: list[int], loads: list[int], slots: int) -> None:
    """Experts in another order give the same plan in that order. Primes, so that no two shares are equal."""
    load, ranks = np.array(loads), (case.owners.ranks * 12)[:12]
    budget = Budget(overlap_degree=12, slots=slots)
    straight = materialize(load, Owners(ranks, case.owners.world_size), case.topology, budget)
    owners = Owners(tuple(ranks[expert] for expert in order), case.owners.world_size)
    shuffled = materialize(load[order], owners, case.topology, budget)
    assert [straight.holders[expert] for expert in order] == list(shuffled.holders)


def test_few_hot_experts_go_everywhere() -> None:
    owners, topology = Owners.contiguous(8, 4), Topology.even(4, 4)
    placement = materialize(np.array([1, 50, 1, 1, 40, 1, 1, 1]), owners, topology, Budget(overlap_degree=2, slots=3))
    assert [len(ranks) for ranks in placement.holders] == [1, 4, 1, 1, 4, 1, 1, 1]


def test_replicas_spread_over_nodes_first() -> None:
    owners, topology = Owners.contiguous(8, 8), Topology.even(8, 2)
    load = np.array([80, 1, 1, 1, 1, 1, 1, 1])
    placement = materialize(load, owners, topology, Budget(overlap_degree=2, slots=1))
    assert {topology.node_of[rank] for rank in placement.holders[0]} == {0, 1, 2, 3}


@pytest.mark.parametrize(("ranks", "filled"), [(8, True), (32, False)])
def test_free_slots_are_filled_unless_that_costs_more_than_five_percent(ranks: int, filled: bool) -> None:
    owners, topology = Owners.contiguous(32, ranks), Topology.even(ranks, 8)
    sizes = LayerSizes(row_flops=6 * 96 * 128, row_bytes=4 * 96, expert_bytes=3 * 4 * 96 * 128)
    links = Rates(flops=8e9, rank_bytes=2e8, node_bytes=2e8, hidden_seconds=0.2)
    costs = CostModel(topology=topology, sizes=sizes, rates=links)
    load = np.full(32, 64 * ranks)
    load[0] *= 20
    choice, plain, always = (
        materialize_fastest(load, owners, costs, slots=2, fills=fills) for fills in (None, False, True)
    )
    # One is slower by one per cent, the other by thirteen.
    assert plain.time.total < always.time.total
    assert (always.time.total <= 1.05 * plain.time.total) == filled
    assert choice.placement == (always if filled else plain).placement
    assert choice.recipe is not None
    assert choice.recipe.fills == filled


def test_transfers_that_cannot_be_hidden_are_not_worth_a_small_gain() -> None:
    owners, topology = Owners.contiguous(8, 4), Topology.even(4, 4)
    load = np.array([1200, 1000, 1000, 1000, 1000, 1000, 1000, 1000])
    slow = Rates(flops=1e13, rank_bytes=1e8, node_bytes=1e8)
    hidden = Rates(flops=1e13, rank_bytes=1e8, node_bytes=1e8, hidden_seconds=10.0)
    for links, replicas in ((slow, False), (hidden, True)):
        choice = materialize_fastest(load, owners, costs_of(topology, links), slots=2)
        assert (choice.placement.num_replicas > 0) == replicas


def test_the_papers_regime_gains_from_experts_on_every_node() -> None:
    """Slow links between nodes: rows that stay in the node are worth more than balance."""
    owners, topology = Owners.contiguous(32, 8), Topology.even(8, 4)
    load = np.rint(8 * 8192 * 2 / np.arange(1, 33) ** 0.8 / 7).astype(np.int64)
    links = Rates(flops=5e13, rank_bytes=150e9, node_bytes=12.5e9, hidden_seconds=2e-3)
    choice = materialize_fastest(load, owners, costs_of(topology, links), slots=4)
    hottest = {topology.node_of[rank] for rank in choice.placement.holders[0]}
    assert choice.recipe is not None
    assert choice.recipe.spread
    assert hottest == {0, 1}


@pytest.mark.parametrize("experts", [32, 64])
@pytest.mark.parametrize("zipf", [0.0, 0.5, 1.0])
def test_never_slower_than_the_papers_rule_where_rows_cost_most(experts: int, zipf: float) -> None:
    """Links between nodes so slow that rows on them are most of a step, and time to hide a few experts."""
    topology, owners = Topology.even(8, 4), Owners.contiguous(experts, 8)
    weights = np.random.default_rng(0).permutation(1.0 / np.arange(1, experts + 1) ** zipf)
    load = np.rint(65536 * weights / weights.sum()).astype(np.int64)
    links = Rates(flops=1e13, rank_bytes=1e11, node_bytes=1e9, hidden_seconds=5e-2)
    choice = materialize_fastest(load, owners, costs_of(topology, links), slots=2)
    overlap = int(links.hidden_seconds * links.node_bytes / (2 * SIZES.expert_bytes))
    paper = materialize(load, owners, topology, Budget(overlap_degree=overlap, slots=2))
    split = local_split(load.tolist(), paper, topology)
    assert choice.time.total <= costs_of(topology, links).step(load.tolist(), split, paper).total


def test_even_loads_are_spread_from_all_nodes_alike() -> None:
    """A link has two directions: hot experts of one node alone would fill one of them."""
    topology, owners = Topology.even(8, 4), Owners.contiguous(32, 8)
    links = Rates(flops=1e13, rank_bytes=1e11, node_bytes=1e9, hidden_seconds=5e-2)
    choice = materialize_fastest(np.full(32, 2048), owners, costs_of(topology, links), slots=2)
    across, _ = stages_of(choice.placement, topology)
    sent = np.bincount(topology.nodes[across.sources], minlength=2)
    assert sent[0] == sent[1] > 0


@FAST
@given(cases().flatmap(lambda case: st.tuples(st.just(case), placements(case))))
def test_transfers_bring_every_replica_once_and_cross_to_a_node_once(drawn: tuple[Case, Placement]) -> None:
    case, placement = drawn
    has = {(e, owner) for e, owner in enumerate(case.owners.ranks)}
    crossings = set()
    for number, stage in enumerate(stages_of(placement, case.topology)):
        arrived = set()
        for expert, source, rank in zip(stage.experts, stage.sources, stage.destinations, strict=True):
            assert (expert, source) in has, "a rank sends what it has"
            assert (expert, rank) not in has | arrived, "nothing arrives twice"
            arrived.add((expert, rank))
            nodes = case.topology.node_of[source], case.topology.node_of[rank]
            assert (nodes[0] != nodes[1]) == (number == 0)
            if number == 0:
                assert (expert, nodes[1]) not in crossings
                crossings.add((expert, nodes[1]))
        has |= arrived
    assert has == set(zip(*(values.tolist() for values in placement.pairs), strict=True))


@FAST
@given(cases().flatmap(lambda case: st.tuples(st.just(case), placements(case))))
def test_a_matrix_says_everything(drawn: tuple[Case, Placement]) -> None:
    _, placement = drawn
    assert Placement.from_matrix(placement.matrix) == placement
    assert placement.includes(Placement.owned(placement.owners))


def test_predict() -> None:
    history = [np.array(line) for line in ([100, 0], [1, 2], [2, 2], [4, 5])]
    assert expected_load(history, 3).tolist() == [2, 3]
    assert expected_load(history, 100).tolist() == [27, 2]
    with pytest.raises(ValueError, match="window"):
        expected_load(history, 0)


def test_steps_count_as_one_load_while_they_differ_by_chance_only() -> None:
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 33)
    noisy = [rng.multinomial(2000, weights / weights.sum()) for _ in range(5)]
    moved = [rng.multinomial(2000, weights[::-1] / weights.sum()) for _ in range(2)]
    assert steady_steps(noisy, 5) == 5
    assert steady_steps(noisy, 3) == 3
    assert steady_steps([*noisy, *moved], 5) == 2
    assert steady_steps([*noisy, *moved, noisy[0]], 5) == 1, "what it was before does not count again"
    # The same proportions with more rows: chance is smaller, so less is chance.
    assert steady_steps([100 * load for load in noisy], 5) == 1
    assert steady_steps([np.zeros(4, dtype=np.int64)] * 3, 5) == 3


def test_rematerialized_experts_travel_three_times() -> None:
    owners, topology = Owners.contiguous(4, 4), Topology.even(4, 2)
    costs = CostModel(topology=topology, sizes=SIZES, rates=Rates(flops=1e13, rank_bytes=1e11, node_bytes=1e10))
    again = replace(costs, sizes=replace(SIZES, expert_transfers=3))
    placement = Placement.with_replicas(owners, [{2}, set(), set(), set()])
    assert again.replica_seconds(placement) == pytest.approx(1.5 * costs.replica_seconds(placement))


def test_moves_take_the_busiest_link() -> None:
    """An expert moves with two moments; ranks 0 and 1 are a node, and its link carries both ways at once."""
    costs = CostModel(
        topology=Topology.even(4, 2),
        sizes=LayerSizes(row_flops=1, row_bytes=1, expert_bytes=8),
        rates=Rates(flops=1, rank_bytes=4, node_bytes=2),
    )
    old = Owners((0, 1, 2, 3), 4)
    assert costs.reshard_seconds(old, old) == 0
    assert costs.reshard_seconds(old, Owners((1, 0, 2, 3), 4)) == 3 * 8 / 4
    assert costs.reshard_seconds(old, Owners((2, 1, 0, 3), 4)) == 3 * 8 / 2
    assert costs.reshard_seconds(old, Owners((2, 3, 0, 1), 4)) == 2 * 3 * 8 / 2


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="without gaps"):
        Topology((0, 2))
    with pytest.raises(ValueError, match="not be negative"):
        Budget(overlap_degree=-1, slots=0)
    with pytest.raises(ValueError, match="must be positive"):
        Rates(flops=0, rank_bytes=1, node_bytes=1)
