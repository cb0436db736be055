"""The plan of an exchange by nodes against the plain reference, for any counts, ownership, replicas and nodes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.ops.node_ticket import (
    Arriving,
    Leaving,
    Passing,
    arriving,
    leaving,
    message_lengths,
    passing,
    relays_of,
)
from hecate.runtime.ops.ticket import make_tickets
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens
from hecate.runtime.placement.topology import Topology
from tests.runtime.placement.planner.cases import FAST, PLACED, Case
from tests.support import reference

Plans = tuple[list[Leaving], list[Passing], list[Arriving]]


def plans_of(case: Case, placement: Placement, tokens: list[torch.Tensor]) -> Plans:
    """What all ranks plan together, without a process group."""
    ranks = range(case.topology.world_size)
    lengths = message_lengths(case.counts, placement, case.topology)
    quotas = [assign_tokens(case.counts, placement, case.topology, rank) for rank in ranks]
    tickets = [make_tickets(quotas[rank], torch.device("cpu"))[0] for rank in ranks]
    out = [
        leaving(tokens[r].numpy(), t.splits[0].numpy(), t.send_index.numpy(), lengths[r], case.topology, r)
        for r, t in enumerate(tickets)
    ]
    sent = [np.split(o.messages, np.cumsum(lengths[rank])[:-1]) for rank, o in enumerate(out)]
    through = [
        passing(np.concatenate([parts[rank] for parts in sent]), lengths[:, rank], case.topology, rank)
        for rank in ranks
    ]
    into = [
        arriving(t.splits[1].numpy(), t.receive_index.numpy(), case.topology, rank) for rank, t in enumerate(tickets)
    ]
    return out, through, into


def hop(rows: list[torch.Tensor], sent: list[np.ndarray]) -> list[torch.Tensor]:
    """An all-to-all of all ranks' rows."""
    parts = [list(of.split(to.tolist())) for of, to in zip(rows, sent, strict=True)]
    return [torch.cat([of[rank] for of in parts]) for rank in range(len(rows))]


@FAST
@given(PLACED, st.integers(1, 8), st.integers(0, 99))
def test_rows_cross_once_and_arrive_in_slot_order(drawn: tuple[Case, Placement], choices: int, seed: int) -> None:
    case, placement = drawn
    topology, ranks = case.topology, range(case.topology.world_size)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.from_numpy(case.counts)
    totals = counts.sum(1).tolist()
    # Tokens with any number of rows, also several for one expert; padding behind the last row.
    tokens = [torch.randint(0, 1 + total // choices, (total + 2,), generator=generator) for total in totals]
    rows = [torch.tensor([[rank, i] for i in range(total)]).view(-1, 2) for rank, total in enumerate(totals)]
    offsets = list(counts.cumsum(1))
    sends = [assign_tokens(case.counts, placement, topology, rank).sends for rank in ranks]
    routes = reference.route_nodes(tokens, offsets, placement, sends, topology)
    out, through, into = plans_of(case, placement, tokens)

    # There.
    here = hop([rows[r][o.send_index] for r, o in enumerate(out)], [o.sent for o in out])
    copies = hop([here[r][t.middle_index] for r, t in enumerate(through)], [t.sent for t in through])
    arrived = [copies[r][i.receive_index] for r, i in enumerate(into)]
    for got, want in zip(arrived, reference.exchange_nodes(rows, routes), strict=True):
        assert torch.equal(got, want)

    # Splits of senders and receivers agree.
    for rank in ranks:
        for other in ranks:
            assert out[rank].sent[other] == through[other].received[rank]
            assert through[rank].sent[other] == into[other].received[rank]
            if topology.node_of[rank] != topology.node_of[other]:
                assert through[rank].sent[other] == 0, "the second hop stays inside nodes"

    # Each pair of token and node crosses once.
    for rank, o in enumerate(out):
        destinations = np.repeat(topology.nodes, o.sent)
        pairs = list(zip(tokens[rank][o.send_index].tolist(), destinations.tolist(), strict=True))
        assert len(pairs) == len(set(pairs))
        wanted = {
            (int(tokens[rank][row]), topology.node_of[to])
            for to in ranks
            for source, row in routes[to]
            if source == rank
        }
        assert set(pairs) == wanted

    # Back: the transpose.
    values = [torch.randint(0, 9, (len(route), 1), generator=generator) for route in routes]
    by_relay = [
        torch.empty_like(v).index_copy_(0, torch.from_numpy(into[r].receive_index), v) for r, v in enumerate(values)
    ]
    home = hop(by_relay, [i.received for i in into])
    sums = [
        torch.zeros(int(t.received.sum()), 1, dtype=torch.int64).index_add_(0, torch.from_numpy(t.middle_index), h)
        for t, h in zip(through, home, strict=True)
    ]
    returned = hop(sums, [t.received for t in through])
    for rank, want in enumerate(reference.exchange_nodes_back(values, routes, totals)):
        got = torch.zeros(totals[rank], 1, dtype=torch.int64)
        assert torch.equal(got.index_copy_(0, torch.from_numpy(out[rank].send_index), returned[rank]), want)


def test_relays_share_the_work_of_a_node() -> None:
    topology = Topology((0, 1, 1, 0, 1))
    relays = relays_of(topology)
    assert relays.tolist() == [[0, 1], [0, 1], [3, 2], [3, 2], [0, 4]]
    for rank in range(5):
        assert relays[rank, topology.node_of[rank]] == rank
        assert relays[rank].tolist() == [reference.relay_of(rank, node, topology) for node in (0, 1)]
