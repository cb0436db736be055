"""An exchange's indices written on the device, against those that the host writes."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hecate.runtime.kernels.expand_segments import expand_segments, expand_segments_reference
from hecate.runtime.one_sided.split_rows import split_rows, split_rows_reference
from hecate.runtime.ops import ticket
from hecate.runtime.ops.ticket import make_tickets
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens
from hecate.runtime.placement.planner.balance import balance
from hecate.runtime.placement.planner.dispatch import quota_matrix
from hecate.runtime.placement.topology import Topology
from tests.runtime.kernels.device import DEVICE, MARKS, index_of
from tests.runtime.placement.planner.cases import Case, cases, placements
from tests.support.counted import Copies
from tests.support.extent import ALL

pytestmark = MARKS


def test_expand_segments(launches: list[str]) -> None:
    starts, ends = index_of(7, 9, 0, 3, 5), index_of(2, 2, 2, 5, 5)
    assert expand_segments(starts, ends, 5).tolist() == [7, 8, 3, 4, 5]
    assert expand_segments(index_of(), index_of(), 0).shape == (0,)
    assert expand_segments(index_of(4), index_of(0), 0).shape == (0,)
    assert launches == ["expand_segments"]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from([0, 0, 1, 2, 7, 600])), max_size=40))
def test_expand_any_segments(ranges: list[tuple[int, int]]) -> None:
    starts, lengths = index_of(*(start for start, _ in ranges)), index_of(*(length for _, length in ranges))
    ends, total = lengths.cumsum(0), int(lengths.sum())
    found = expand_segments(starts, ends, total)
    assert torch.equal(found, expand_segments_reference(starts, ends, total))
    assert found.tolist() == [start + i for start, length in ranges for i in range(length)]


@settings(max_examples=1000 if ALL else 30, deadline=None)
@given(cases().flatmap(lambda case: st.tuples(st.just(case), placements(case))), st.integers(1, 3))
def test_tickets_are_those_of_the_host(drawn: tuple[Case, Placement], chunks: int) -> None:
    case, placement = drawn
    for rank in range(min(case.topology.world_size, 2)):
        quotas = assign_tokens(case.counts, placement, case.topology, rank)
        tickets = make_tickets(quotas, DEVICE, chunks)
        with mock.patch.object(ticket, "runs_on", lambda _: False):
            of_host = make_tickets(quotas, DEVICE, chunks)
        for found, expected in zip(tickets, of_host, strict=True):
            for name in ("slot_offsets", "splits", "send_index", "receive_index"):
                one, other = getattr(found, name), getattr(expected, name)
                assert one.dtype == other.dtype and torch.equal(one, other), name


def test_all_chunks_take_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, owners = Copies(monkeypatch), Owners.contiguous(4, 2)
    placement = Placement.with_replicas(owners, [{1}, set(), {0}, set()])
    quotas = assign_tokens(np.array([[9, 1, 5, 0], [4, 4, 8, 3]]), placement, Topology.even(2, 2), 1)
    for chunks in (1, 3):
        tickets = make_tickets(quotas, DEVICE, chunks)
        assert len(tickets) == chunks and copies.take() == 1


def test_rows_are_split_where_all_nodes_hold_all_experts(launches: list[str]) -> None:
    """So rows stay on ranks, on nodes, and cross, for each expert."""
    rng = np.random.default_rng(0)
    topology, owners = Topology((0, 2, 1, 0, 2, 1, 2)), Owners.contiguous(5, 7)
    case = Case(topology, owners, rng.integers(0, 100, (7, 5)) ** 2)
    placement = Placement.with_replicas(owners, [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 6}, {3, 4, 5, 6}, {0, 5}, {2, 4, 6}])
    for rank in range(7):
        compare_splits(case, placement, rank)
    assert launches == ["split_rows"] * 7


def compare_splits(case: Case, placement: Placement, rank: int) -> None:
    wanted = quota_matrix(balance(case.load.tolist(), placement, case.topology), placement)
    expected = assign_tokens(case.counts, placement, case.topology, rank)
    order = np.argsort(case.topology.position)
    operands = [
        torch.from_numpy(array).to(DEVICE) for array in (case.counts, wanted, order, case.topology.nodes[order])
    ]
    for split in (split_rows, split_rows_reference):
        sends, receives = split(*operands, rank)
        assert np.array_equal(sends.cpu().numpy(), expected.sends), split.__name__
        assert np.array_equal(receives.cpu().numpy(), expected.receives), split.__name__
