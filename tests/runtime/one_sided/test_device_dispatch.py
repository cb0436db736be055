"""Dispatch on a device against the host's, as far as it is plain torch; its kernels are in ``kernels/cases``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate.runtime.one_sided.device_dispatch import DeviceTables, bounded_ticket
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.topology import Topology
from tests.runtime.one_sided.dispatch_cases import Dispatch, check_dispatch, check_quotas, random_dispatch

CPU = torch.device("cpu")


def test_a_thousand_random_cases_are_those_of_the_host() -> None:
    for seed in range(1000):
        given = random_dispatch(seed)
        check_quotas(given, CPU)
        check_dispatch(given, CPU)


def test_random_cases_are_of_all_kinds() -> None:
    """Replicas that change something, nodes out of order, rows that move, and the rule that owners may be better."""
    given = [random_dispatch(seed) for seed in range(200)]
    assert any(not one.counts.any() for one in given)
    assert any(not one.topology.in_order and one.topology.num_nodes > 1 for one in given)
    assert any(one.placement.num_replicas == 0 for one in given)
    assert any((one.placement.matrix > 0).all() and one.topology.world_size > 4 for one in given)


@pytest.mark.parametrize("percent", [0, 50, 100, 150])
def test_nothing_travels_where_a_rank_has_no_room(percent: int) -> None:
    for seed in range(30):
        check_dispatch(random_dispatch(seed), CPU, percent, spare=0)


def test_more_ranks_than_a_kernel_has_lanes() -> None:
    rng = np.random.default_rng(0)
    topology, owners = Topology.even(130, 8), Owners.contiguous(140, 130)
    replicas = [set(rng.integers(0, 130, 3).tolist()) for _ in range(140)]
    counts = rng.integers(0, 9, (130, 140)) ** 2
    check_dispatch(Dispatch(counts, Placement.with_replicas(owners, replicas), topology, rank=129), CPU)


def test_tables_with_more_room_make_the_same_tickets() -> None:
    """Experts that do not exist get no rows, and slots that hold them are empty."""
    for seed in range(300):
        given = random_dispatch(seed)
        rank, counts = given.rank, torch.from_numpy(given.counts)
        exact, roomy = (
            DeviceTables.from_placement(given.placement, given.topology, rank, CPU, replicas=more, replicated=lines)
            for more, lines in ((0, 0), (len(given.placement.holders) + 2, len(given.placement.holders) + seed % 3))
        )
        rows, percent = int(counts[rank].sum()) + 1, 100 * given.topology.world_size
        found, expected = (bounded_ticket(counts, t, rows=rows, percent=percent) for t in (roomy, exact))
        held = len(exact.slots)
        assert len(roomy.slots) == given.placement.owners.counts[rank] + len(given.placement.holders) + 2
        assert torch.equal(found.slot_offsets[:held], expected.slot_offsets)
        assert (found.slot_offsets[held:] == (expected.slot_offsets[-1] if held else 0)).all()
        for name in ("splits", "send_index", "receive_index"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (seed, name)
