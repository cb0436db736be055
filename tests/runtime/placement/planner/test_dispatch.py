"""Who computes which rows, and how far that is from the linear program's optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import (
    Budget,
    Rates,
    assign_tokens,
    materialize,
    materialize_fastest,
    rows_per_rank,
    shed_excess,
    split_fastest,
)
from hecate.runtime.placement.planner.balance import balance, balance_in_nodes, owners_only
from hecate.runtime.placement.planner.dispatch import Dispatch, quota_matrix
from hecate.runtime.placement.topology import Topology
from tests.runtime.placement.planner.cases import FAST, SIZES, Case, cases, costs_of, placements, rates

drawn_cases = cases().flatmap(lambda case: st.tuples(st.just(case), placements(case)))


@FAST
@given(drawn_cases, st.sampled_from(["nearest", "balanced"]))
def test_every_row_goes_once_to_a_holder_and_ranks_agree(drawn: tuple[Case, Placement], how: Dispatch) -> None:
    case, placement = drawn
    ranks = range(case.topology.world_size)
    plans = [assign_tokens(case.counts, placement, case.topology, rank, how) for rank in ranks]
    for rank, plan in enumerate(plans):
        assert (plan.sends >= 0).all()
        assert np.array_equal(plan.sends.sum(1), case.counts[rank])
        assert not plan.sends[placement.matrix == 0].any()
        for other, theirs in enumerate(plans):
            assert np.array_equal(plan.sends[:, other], theirs.receives[rank])
    received = np.array([plan.receives.sum() for plan in plans])
    assert np.array_equal(received, rows_per_rank(case.counts, placement, case.topology, how))


@FAST
@given(drawn_cases)
def test_nearest_prefers_the_rank_then_the_node(drawn: tuple[Case, Placement]) -> None:
    case, placement = drawn
    for rank in range(case.topology.world_size):
        sends = assign_tokens(case.counts, placement, case.topology, rank, "nearest").sends
        for expert, ranks in enumerate(placement.holders):
            node = case.topology.node_of[rank]
            near = [r for r in ranks if case.topology.node_of[r] == node]
            allowed = [rank] if rank in ranks else near or list(ranks)
            assert sends[expert, allowed].sum() == case.counts[rank, expert]
            assert np.ptp(sends[expert, allowed]) <= 1


@FAST
@given(drawn_cases)
def test_balanced_keeps_what_it_can_local(drawn: tuple[Case, Placement]) -> None:
    """A holder that takes rows of others has none of its own left to give away, and so for nodes."""
    case, placement = drawn
    quota = np.zeros(placement.matrix.shape, dtype=np.int64)
    split = balance(case.load.tolist(), placement, case.topology)
    for expert, (ranks, part) in enumerate(zip(placement.holders, split, strict=True)):
        quota[expert, list(ranks)] = part
    for rank in range(case.topology.world_size):
        plan = assign_tokens(case.counts, placement, case.topology, rank)
        assert np.array_equal(plan.receives.sum(0), quota[:, rank])
        assert np.array_equal(plan.sends[:, rank], np.minimum(case.counts[rank], quota[:, rank]))


@FAST
@given(drawn_cases)
def test_in_nodes_no_row_leaves_a_node_that_holds_its_expert(drawn: tuple[Case, Placement]) -> None:
    case, placement = drawn
    split = balance_in_nodes(case.load.tolist(), placement, case.topology)
    sizes = case.topology.node_sizes
    for rows, ranks, part in zip(case.load, placement.holders, split, strict=True):
        assert sum(part) == rows
        assert min(part) >= 0
        on_node = np.bincount(case.topology.nodes[list(ranks)], part, minlength=len(sizes))
        holds = np.bincount(case.topology.nodes[list(ranks)], minlength=len(sizes)) > 0
        # Whole rows: less than one is missing.
        assert (on_node > rows * sizes / case.topology.world_size - 1)[holds].all()


@FAST
@given(drawn_cases)
def test_in_nodes_a_single_node_is_as_even_but_for_whole_rows(drawn: tuple[Case, Placement]) -> None:
    case, placement = drawn
    together = Topology((0,) * case.topology.world_size)
    rows = case.load.tolist()
    levels = []
    for split in (balance(rows, placement, together), balance_in_nodes(rows, placement, together)):
        levels.append(quota_matrix(split, placement).sum(0).max())
    # The guard of balance: whole rows never make it slower than owners alone.
    assert levels[0] <= levels[1] <= levels[0] + len(rows)


@FAST
@given(drawn_cases, rates)
def test_the_fastest_split_is_no_slower_than_owners_or_in_nodes(drawn: tuple[Case, Placement], links: Rates) -> None:
    case, placement = drawn
    rows, costs = case.load.tolist(), costs_of(case.topology, links)

    def seconds(split: list[list[int]]) -> float:
        return sum(costs.work(rows, split, placement))

    found = seconds(split_fastest(rows, placement, costs))
    if case.topology.num_nodes > 1:
        assert found <= seconds(balance_in_nodes(rows, placement, case.topology))
        assert found <= seconds(owners_only(rows, placement)) * (1 + 1e-9)


def test_rows_leave_their_node_where_compute_is_slow_and_links_are_fast() -> None:
    topology = Topology((0, 1))
    placement = Placement.with_replicas(Owners((0, 0), 2), [{1}, set()])
    for flops, speed, expected in ((1e9, 1e12, [[0, 300], [300]]), (1e12, 1e6, [[150, 150], [300]])):
        costs = costs_of(topology, Rates(flops=flops, rank_bytes=speed, node_bytes=speed))
        assert split_fastest([300, 300], placement, costs) == expected


def test_with_three_nodes_other_rows_than_those_that_must_may_fill_a_link() -> None:
    topology = Topology((0, 1, 2))
    placement = Placement.with_replicas(Owners((0, 0), 3), [{1}, set()])
    # Compute takes no time. Node 2 holds neither expert; node 0 has to receive rows of the second one anyway.
    costs = costs_of(topology, Rates(flops=1e18, rank_bytes=1e6, node_bytes=1e6))
    found, in_nodes = (
        sum(costs.work([300, 300], split, placement))
        for split in (
            split_fastest([300, 300], placement, costs),
            balance_in_nodes([300, 300], placement, topology),
        )
    )
    assert found < 0.85 * in_nodes


@FAST
@given(drawn_cases, rates, st.sampled_from([1, 2, 8]))
def test_the_work_of_owners_alone_has_a_short_cut(drawn: tuple[Case, Placement], links: Rates, together: int) -> None:
    case, placement = drawn
    rows, costs = case.load.tolist(), costs_of(case.topology, links)
    costs = replace(costs, sizes=replace(costs.sizes, together=together))
    expected = costs.work(rows, owners_only(rows, placement), placement)
    assert costs.owners_work(rows, case.owners) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("topology", [Topology.even(8, 4), Topology((0, 1, 2))], ids=["2 nodes", "3 nodes"])
@pytest.mark.parametrize("skew", [0.0, 0.8], ids=["even", "skewed"])
def test_tokens_that_cross_once_are_counted_once(topology: Topology, skew: float) -> None:
    """Against tokens that choose experts at random: those of other nodes that each needs, counted one by one."""
    rng, experts, choices, tokens = np.random.default_rng(0), 48, 8, 2000
    owners, nodes = Owners.contiguous(experts, topology.world_size), topology.num_nodes
    popular = -skew * np.log(rng.permutation(experts) + 1.0)
    chosen = np.argsort(-popular - rng.gumbel(size=(topology.world_size, tokens, experts)), axis=2)[:, :, :choices]
    visits = np.zeros((topology.world_size, tokens, nodes), dtype=bool)
    np.put_along_axis(visits, topology.nodes[owners.array[chosen]], True, axis=2)
    crossing = np.zeros((nodes, nodes))
    np.add.at(crossing, topology.nodes, visits.sum(1))
    np.fill_diagonal(crossing, 0)
    busiest = max(crossing.sum(0).max(), crossing.sum(1).max())
    costs = costs_of(topology, Rates(flops=1e18, rank_bytes=1e18, node_bytes=4 * SIZES.row_bytes))
    rows = np.bincount(chosen.ravel(), minlength=experts).tolist()
    once = replace(costs, sizes=replace(costs.sizes, together=choices)).owners_work(rows, owners)[1]
    assert once == pytest.approx(busiest, rel=0.1)
    assert costs.owners_work(rows, owners)[1] > 2 * busiest


def shed(case: Case, slots: int, topology: Topology | None = None) -> tuple[Placement, list[int], Ints]:
    """The placement that shedding makes, the slots that are left on each rank, and its rows."""
    rows = case.load.tolist()
    replicas: list[set[int]] = [set() for _ in rows]
    free = [slots] * case.topology.world_size
    have = shed_excess(rows, case.owners, replicas, free, topology)
    placement = Placement.with_replicas(case.owners, replicas)
    assert [sum(held.get(expert, 0) for held in have) for expert in range(len(rows))] == rows
    assert all(placement.matrix[expert, rank] for rank, held in enumerate(have) for expert in held)
    assert (placement.matrix == 1).sum(0).max() <= slots
    return placement, free, np.asarray([sum(held.values()) for held in have])


@FAST
@given(cases(), st.integers(0, 4))
def test_shedding_evens_out_as_far_as_slots_allow(case: Case, slots: int) -> None:
    _, free, level = shed(case, slots)
    share = -(-int(level.sum()) // len(level))
    blocked = all(count >= share or not free[rank] for rank, count in enumerate(level))
    assert level.max() <= share or blocked


@FAST
@given(cases(), st.integers(0, 4))
def test_shedding_in_nodes_adds_replicas_in_the_owners_node_only(case: Case, slots: int) -> None:
    placement, free, level = shed(case, slots, case.topology)
    node_of = case.topology.node_of
    for owner, ranks in zip(case.owners.ranks, placement.holders, strict=True):
        assert {node_of[rank] for rank in ranks} == {node_of[owner]}
    for members in case.topology.members:
        share = max(-(-int(level.sum()) // len(level)), -(-int(level[list(members)].sum()) // len(members)))
        blocked = all(level[rank] >= share or not free[rank] for rank in members)
        assert level[list(members)].max() <= share or blocked


def optimum(load: np.ndarray, placement: Placement) -> float:
    """Least possible rows of the busiest rank: a linear program over the rows of each expert on each holder."""
    experts, ranks = placement.pairs
    n, (num_experts, world_size) = len(experts), placement.matrix.shape
    equal = np.zeros((num_experts, n + 1))
    equal[experts, np.arange(n)] = 1
    below = np.zeros((world_size, n + 1))
    below[ranks, np.arange(n)] = 1
    below[:, n] = -1
    cost = np.zeros(n + 1)
    cost[n] = 1
    return float(linprog(cost, A_ub=below, b_ub=np.zeros(world_size), A_eq=equal, b_eq=load).fun)


def random_placement(rng: np.random.Generator, load: np.ndarray, owners: Owners, topology: Topology) -> Placement:
    """By the paper's rule, by predicted time, or anything."""
    experts, kind = owners.num_experts, rng.integers(3)
    if kind == 0:
        budget = Budget(overlap_degree=int(rng.integers(0, experts + 1)), slots=int(rng.integers(0, 4)))
        return materialize(load, owners, topology, budget)
    if kind == 1:
        links = Rates(flops=1e12, rank_bytes=1e11, node_bytes=1e10, hidden_seconds=1e-2)
        slots = int(rng.integers(1, 4))
        return materialize_fastest(load, owners, costs_of(topology, links), slots=slots).placement
    ranks = [set(rng.integers(0, owners.world_size, int(rng.integers(0, 3))).tolist()) for _ in range(experts)]
    return Placement.with_replicas(owners, ranks)


@pytest.mark.slow
def test_balanced_is_close_to_the_linear_program() -> None:
    """1,000 random cases, with as many rows per rank as in training: whole rows cost less than a row per rank."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(1000):
        world_size, experts = int(rng.choice([2, 4, 8, 16])), int(rng.choice([8, 16, 32, 64]))
        weights = rng.permutation(1.0 / np.arange(1, experts + 1) ** rng.uniform(0, 1.3))
        counts = rng.multinomial(2048, weights / weights.sum(), size=world_size)
        topology = Topology.even(world_size, int(rng.choice([2, world_size])))
        owners = Owners(tuple((rng.permutation(experts) % world_size).tolist()), world_size)
        placement = random_placement(rng, counts.sum(0), owners, topology)
        ratios.append(rows_per_rank(counts, placement, topology).max() / optimum(counts.sum(0), placement))
    print(f"mean {np.mean(ratios):.4f}, 99th percentile {np.percentile(ratios, 99):.4f}, worst {max(ratios):.4f}")
    assert np.mean(ratios) < 1.01
    assert np.percentile(ratios, 99) < 1.03
