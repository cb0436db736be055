"""The exchange plan against the plain reference, for any counts, ownership and replicas."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.comm.collectives import slices_of
from hecate.runtime.ops.ticket import Ticket, join_segments, make_tickets
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens
from tests.runtime.placement.planner.cases import FAST, PLACED, Case
from tests.support import reference


def move(rows: list[torch.Tensor], tickets: list[Ticket]) -> list[torch.Tensor]:
    """What all ranks' exchanges do together, without a process group."""
    sent = [r[t.send_index].split(t.splits[0].tolist()) for r, t in zip(rows, tickets, strict=True)]
    arrived = [torch.cat([parts[rank] for parts in sent]) for rank in range(len(rows))]
    return [a[t.receive_index] for a, t in zip(arrived, tickets, strict=True)]


@FAST
@given(PLACED, st.booleans())
def test_a_ticket_moves_every_row_to_a_holder_in_slot_order(drawn: tuple[Case, Placement], replicated: bool) -> None:
    case, placement = drawn
    if not replicated:
        placement = Placement.owned(case.owners)
    ranks = range(case.topology.world_size)
    counts = torch.from_numpy(case.counts)
    # Every row says where it comes from, so equality means that exactly the right rows arrived.
    rows = [
        torch.tensor([[rank, i] for i in range(int(c.sum()))], dtype=torch.int64).view(-1, 2)
        for rank, c in enumerate(counts)
    ]
    quotas = [assign_tokens(case.counts, placement, case.topology, rank) for rank in ranks]
    tickets = [make_tickets(quotas[rank], torch.device("cpu"))[0] for rank in ranks]
    expected, slot_offsets = reference.exchange(rows, list(counts.cumsum(1)), placement, [q.sends for q in quotas])
    for got, want in zip(move(rows, tickets), expected, strict=True):
        assert torch.equal(got, want)
    for rank, ticket in enumerate(tickets):
        assert torch.equal(ticket.slot_offsets, slot_offsets[rank])
        assert placement.slots_on(rank).tolist() == reference.slots_of(placement, rank)
        for other in ranks:
            assert ticket.splits[0, other] == tickets[other].splits[1, rank]


@FAST
@given(PLACED, st.integers(2, 4))
def test_chunks_are_even_parts_of_one_exchange(drawn: tuple[Case, Placement], chunks: int) -> None:
    case, placement = drawn
    ranks = range(case.topology.world_size)
    rows = [torch.tensor([[rank, i] for i in range(int(c.sum()))]).view(-1, 2) for rank, c in enumerate(case.counts)]
    quotas = [assign_tokens(case.counts, placement, case.topology, rank) for rank in ranks]
    whole = [make_tickets(quotas[rank], torch.device("cpu"))[0] for rank in ranks]
    of_ranks = [make_tickets(quotas[rank], torch.device("cpu"), chunks) for rank in ranks]
    parts = [list(of_chunk) for of_chunk in zip(*of_ranks, strict=True)]
    assert len(parts) == chunks
    moved = [move(rows, tickets) for tickets in parts]
    for rank, arrived in enumerate(move(rows, whole)):
        sizes = torch.stack([tickets[rank].slot_offsets.diff(prepend=torch.zeros(1)) for tickets in parts])
        for slot, length in enumerate(whole[rank].slot_offsets.diff(prepend=torch.zeros(1)).long()):
            end = int(whole[rank].slot_offsets[slot])
            wanted = arrived[end - int(length) : end]
            ends = [int(tickets[rank].slot_offsets[slot]) for tickets in parts]
            got = torch.cat(
                [m[rank][end - int(size) : end] for m, end, size in zip(moved, ends, sizes[:, slot], strict=True)]
            )
            assert sorted(got.tolist()) == sorted(wanted.tolist()), "every row is in one chunk, and in its slot"
        # Of what one rank sends to one slot, chunks differ by a row at most.
        assert (sizes.max(0).values - sizes.min(0).values <= len(ranks)).all()
        for tickets in parts:
            for other in ranks:
                assert tickets[rank].splits[0, other] == tickets[other].splits[1, rank]


def test_join_segments() -> None:
    assert join_segments(np.array([7, 0, 3]), np.array([2, 0, 3])).tolist() == [7, 8, 3, 4, 5]
    assert join_segments(np.array([5]), np.array([0])).tolist() == []


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
