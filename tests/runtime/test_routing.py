"""The exchange plan against the plain reference, for any counts and any ownership."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hecate.runtime import reference
from hecate.runtime.owners import Owners, slices_of
from hecate.runtime.routing import Ticket, join_segments, plan_owned


@st.composite
def routings(draw: st.DrawFn) -> tuple[Owners, torch.Tensor]:
    """Owners in any order, some ranks without experts, and counts with many zeros."""
    world_size = draw(st.integers(1, 5))
    num_experts = draw(st.integers(1, 7))
    ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=num_experts, max_size=num_experts))
    count = st.sampled_from([0, 0, 1, 2, 5])
    rows = st.lists(count, min_size=num_experts, max_size=num_experts)
    counts = draw(st.lists(rows, min_size=world_size, max_size=world_size))
    return Owners(tuple(ranks), world_size), torch.tensor(counts, dtype=torch.int64)


def move(rows: list[torch.Tensor], tickets: list[Ticket]) -> list[torch.Tensor]:
    """What all ranks' exchanges do together, without a process group."""
    sent = [r[t.send_index].split(t.splits[0].tolist()) for r, t in zip(rows, tickets, strict=True)]
    arrived = [torch.cat([parts[rank] for parts in sent]) for rank in range(len(rows))]
    return [a[t.receive_index] for a, t in zip(arrived, tickets, strict=True)]


@settings(max_examples=200, deadline=None)
@given(routings())
def test_plan_moves_every_row_to_its_owner_in_slot_order(case: tuple[Owners, torch.Tensor]) -> None:
    owners, counts = case
    offsets = list(counts.cumsum(1))
    # Every row says where it comes from, so equality means that exactly the right rows arrived.
    rows = [
        torch.tensor([[rank, i] for i in range(int(c.sum()))], dtype=torch.int64).view(-1, 2)
        for rank, c in enumerate(counts)
    ]
    tickets = [plan_owned(counts, owners, rank, torch.device("cpu")) for rank in range(owners.world_size)]
    expected, slot_offsets = reference.exchange(rows, offsets, owners)
    for got, want in zip(move(rows, tickets), expected, strict=True):
        assert torch.equal(got, want)
    for rank, ticket in enumerate(tickets):
        assert torch.equal(ticket.slot_offsets, slot_offsets[rank])
        for other in range(owners.world_size):
            assert ticket.splits[0, other] == tickets[other].splits[1, rank]


def test_join_segments() -> None:
    starts, lengths = torch.tensor([7, 0, 3]), torch.tensor([2, 0, 3])
    assert join_segments(starts, lengths).tolist() == [7, 8, 3, 4, 5]
    assert join_segments(torch.tensor([5]), torch.tensor([0])).tolist() == []


@given(st.integers(1, 40), st.integers(1, 12))
def test_contiguous_owners_are_even(num_experts: int, world_size: int) -> None:
    owners = Owners.contiguous(num_experts, world_size)
    assert sum(owners.counts) == num_experts
    assert max(owners.counts) - min(owners.counts) <= 1
    assert owners.in_order
    assert sorted(e for rank in range(world_size) for e in owners.owned_by(rank)) == list(range(num_experts))


def test_slices_have_their_own_storage() -> None:
    full = torch.arange(12.0).view(4, 3)
    for experts in ([1, 2], [3, 0], []):
        part = slices_of(full, experts)
        assert torch.equal(part, full[experts])
        assert part.untyped_storage().nbytes() == part.numel() * 4
