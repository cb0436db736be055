"""Dispatch on the device by its kernels, against the planner and the host's ticket."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate.runtime.kernels.expand_segments import expand_segments, expand_segments_reference
from hecate.runtime.one_sided.balance_rows import balance_rows, balance_rows_reference
from hecate.runtime.one_sided.device_dispatch import DeviceTables
from hecate.runtime.one_sided.ticket_segments import ticket_segments
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner.balance import Block, balance, cut_at, even_out, local_ends
from hecate.runtime.placement.planner.dispatch import quota_matrix
from hecate.runtime.placement.topology import Topology
from tests.runtime.kernels.device import DEVICE, MARKS, index_of
from tests.runtime.one_sided.dispatch_cases import Dispatch, check_dispatch, random_dispatch
from tests.runtime.placement.planner.cases import Case
from tests.support.extent import ALL

pytestmark = MARKS


# Two for each second, where they are interpreted.
@pytest.mark.timeout(1800)
def test_random_cases_are_those_of_the_host(launches: list[str]) -> None:
    for seed in range(1000 if ALL else 25):
        # With places left, exactly full on the way out, and maybe too small.
        percent, spare = ((None, 3), (None, 0), (100, 0))[seed % 3]
        check_dispatch(random_dispatch(seed), DEVICE, percent, spare)
    assert {"balance_rows", "split_rows", "ticket_segments", "expand_segments"} <= set(launches)


def test_sixty_four_ranks(launches: list[str]) -> None:
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, 33)
    counts = rng.multinomial(4096, weights / weights.sum(), size=64).astype(np.int64)
    replicas = [set(rng.choice(64, 12 if expert < 4 else 2).tolist()) for expert in range(20)] + [set()] * 12
    placement = Placement.with_replicas(Owners.contiguous(32, 64), replicas)
    found = check_dispatch(Dispatch(counts, placement, Topology.even(64, 8), rank=3), DEVICE)
    assert found.splits[1].count_nonzero() > 8
    quotas, ticket = ["balance_rows"] * 2 + ["split_rows"], ["ticket_segments"] * 2 + ["expand_segments"] * 2
    assert launches == quotas + ticket


def compare_balance(case: Case, placement: Placement) -> None:
    expected = quota_matrix(balance(case.load.tolist(), placement, case.topology), placement)
    tables = DeviceTables.from_placement(placement, case.topology, 0, DEVICE)
    operands = torch.from_numpy(case.counts).to(DEVICE), tables.owners, tables.replicated, tables.parts
    for how in (balance_rows, balance_rows_reference):
        assert np.array_equal(how(*operands).cpu().numpy(), expected), how.__name__


def test_all_ranks_hold_all() -> None:
    for ranks, experts in ((7, 3), (8, 1), (1, 4), (5, 9)):
        counts = np.random.default_rng(ranks).integers(0, 40, (ranks, experts)) ** 2
        owners = Owners.contiguous(experts, ranks)
        placement = Placement.with_replicas(owners, [set(range(ranks))] * experts)
        compare_balance(Case(Topology.even(ranks, 3), owners, counts), placement)


def test_rows_stay_with_owners_where_that_is_better(launches: list[str]) -> None:
    """Sweeps end early where one gains less than a thousandth."""
    found = [one for one in map(_owners_case, range(2000)) if _owners_are_better(one)]
    assert found, "no such case was drawn"
    for one in found[:5]:
        compare_balance(Case(one.topology, one.placement.owners, one.counts), one.placement)
    assert launches


def _owners_case(seed: int) -> Dispatch:
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(3, 7)), int(rng.integers(3, 9))
    counts = np.zeros((ranks, experts), dtype=np.int64)
    counts[0] = rng.integers(0, 12, experts)
    owners = Owners(tuple(rng.integers(0, ranks, experts).tolist()), ranks)
    replicas = [set(rng.integers(0, ranks, int(rng.integers(0, 3))).tolist()) for _ in range(experts)]
    return Dispatch(counts, Placement.with_replicas(owners, replicas), Topology.even(ranks, 2), rank=0)


def _owners_are_better(one: Dispatch) -> bool:
    """Whether the sweeps end above owners alone, so that the rule is what decides."""
    rows, owners = one.counts.sum(0).tolist(), one.placement.owners
    alone, blocks = [0] * owners.world_size, []
    for expert, holders in enumerate(one.placement.holders):
        if len(holders) == 1:
            alone[holders[0]] += rows[expert]
        else:
            quota = cut_at(rows[expert], local_ends(holders, one.topology))
            blocks.append(Block(rows[expert], expert, holders, quota))
    return max(even_out(alone, blocks)) > max(owners.rows(rows))


def test_a_kernel_for_no_experts() -> None:
    nothing = index_of()
    counts, parts = torch.zeros(3, 0, dtype=torch.int64, device=DEVICE), nothing.new_zeros(0, 4)
    assert balance_rows(counts, nothing, nothing, parts).shape == (0, 3)
    found = ticket_segments(counts.t(), counts, nothing, nothing)
    assert found.splits.tolist() == [[0] * 3] * 2


def test_a_rank_without_slots() -> None:
    """It sends, and gets nothing."""
    placement = Placement.owned(Owners((0, 0), 2))
    given = Dispatch(np.array([[1, 2], [3, 0]]), placement, Topology((0, 0)), rank=1)
    assert check_dispatch(given, DEVICE).splits.tolist() == [[3, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 9, 600])
def test_more_or_fewer_numbers_than_ranges_have(total: int) -> None:
    starts, ends = index_of(7, 9, 3, 5), index_of(2, 2, 5, 5)
    found = expand_segments(starts, ends, total)
    assert torch.equal(found, expand_segments_reference(starts, ends, total))
    assert found.tolist() == ([7, 8, 3, 4, 5] + [0] * total)[:total]


@pytest.mark.parametrize("total", [3, 9])
def test_nothing_is_written_around_an_index(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    around = torch.full((1024 + total,), -7, dtype=torch.int64, device=DEVICE)
    inside = around[512 : 512 + total]
    monkeypatch.setattr(torch, "empty", lambda *_, **__: inside)
    found = expand_segments(index_of(7, 3), index_of(2, 5), total)
    assert found is inside and found.tolist() == ([7, 8, 3, 4, 5] + [0] * total)[:total]
    assert (around[:512] == -7).all() and (around[512 + total :] == -7).all()
