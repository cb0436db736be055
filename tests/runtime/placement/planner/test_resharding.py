"""Who owns what: the paper's Algorithm 2, and swaps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import (
    CostModel,
    Rates,
    materialize_fastest,
    rows_per_rank,
    shard_owners,
    swap_owners,
)
from hecate.runtime.placement.planner.fastest import seconds_of
from hecate.runtime.placement.topology import Topology
from tests.runtime.placement.planner.cases import FAST, SIZES, Case, cases, rates


@FAST
@given(cases(), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_every_expert_has_one_owner_and_ranks_keep_their_slots(case: Case, overlap: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    even = Owners.contiguous(case.owners.num_experts, case.owners.world_size)
    owners = [case.owners, *([even] * (len(overlap) - 1))]
    loads = [rng.integers(0, 50, case.owners.num_experts) for _ in owners]
    new = shard_owners(loads, owners, case.topology, overlap)
    before, after = (np.sum([layer.counts for layer in o], axis=0) for o in (owners, new))
    assert np.array_equal(before, after)
    assert [layer.num_experts for layer in new] == [case.owners.num_experts] * len(owners)
    assert new == shard_owners([load.copy() for load in loads], owners, case.topology, overlap)


def test_cold_experts_spread_evenly() -> None:
    """Hot experts side by side: contiguous owners are uneven, the new ones are not."""
    topology, load = Topology.even(4, 2), np.array([9, 9, 8, 8, 1, 1, 2, 2])
    (new,) = shard_owners([load], [Owners.contiguous(8, 4)], topology, [0])
    assert rows_per_rank(load[None].repeat(4, 0), Placement.owned(new), topology).tolist() == [40] * 4


def test_hot_experts_take_the_slots_that_remain() -> None:
    """The hottest two are replicated anyway, so only the others are spread."""
    topology, load = Topology.even(2, 2), np.array([100, 90, 3, 3, 2, 2])
    (new,) = shard_owners([load], [Owners.contiguous(6, 2)], topology, [2])
    cold = np.where(load > 10, 0, load)
    assert rows_per_rank(cold[None].repeat(2, 0), Placement.owned(new), topology).tolist() == [10, 10]


@FAST
@given(cases(), rates, st.integers(0, 2))
def test_swaps_keep_counts_and_make_steps_no_slower(case: Case, links: Rates, slots: int) -> None:
    costs = CostModel(topology=case.topology, sizes=SIZES, rates=links)
    recipe = materialize_fastest(case.load, case.owners, costs, slots=slots).recipe
    new = swap_owners(case.load, case.owners, costs, slots=slots, recipe=recipe)
    assert new.counts == case.owners.counts
    before, after = (seconds_of(case.load, o, costs, slots=slots, recipe=recipe) for o in (case.owners, new))
    assert after <= before
    assert new == swap_owners(case.load.copy(), case.owners, costs, slots=slots, recipe=recipe)


def test_a_swap_parts_two_hot_experts_and_moves_nothing_else() -> None:
    topology, load = Topology.even(4, 2), np.array([900, 800, 90, 91, 92, 93, 94, 95])
    owners = Owners.contiguous(8, 4)
    costs = CostModel(topology=topology, sizes=SIZES, rates=Rates(flops=1e13, rank_bytes=1e11, node_bytes=1e10))
    new = swap_owners(load, owners, costs, slots=0, recipe=None)
    assert topology.node_of[new.ranks[0]] != topology.node_of[new.ranks[1]]
    assert sum(a != b for a, b in zip(owners.ranks, new.ranks, strict=True)) <= 4
