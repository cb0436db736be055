"""Plans of exchanges in which a token's row crosses to another node once: pure functions on integers.

    sender ──▶ relay in the node ──▶ holders of the token's experts in that node

The relay of a sender is the rank with the same place in the other node (modulo its size); in its own node a rank is
its own relay. The first row of a token that goes to a node stands for all of its rows that go there; the relay makes
as many copies as there are choices. Holders get them in the same order as in an exchange of single rows
(``hecate.runtime.ops.ticket``). All splits follow from the counts but two, which only the sender knows and tells its
relays (:func:`leaving`): how many rows stand for others, and which copies of them go where.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.ops.ticket import join_segments
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.topology import Topology

# Parts of a ticket by nodes: splits, send index, middle index, receive index.
NODE_TICKET_PARTS = 4


@lru_cache(maxsize=8)
def relays_of(topology: Topology) -> Ints:
    """Return the rank that takes the rows of each rank for each node, int64 ``[W, N]``."""
    found = np.empty((topology.world_size, topology.num_nodes), dtype=np.int64)
    for ranks in topology.members:
        for place, rank in enumerate(ranks):
            found[rank] = [others[place % len(others)] for others in topology.members]
    # Callers share the array.
    found.setflags(write=False)
    return found


def message_lengths(counts: Ints, placement: Placement, topology: Topology) -> Ints:
    """Return the length of the message from each rank to each, int64 ``[W, W]``, known to both before it is written.

    A message has room for every row that may go to the node: of the rows ``counts`` ``[W, E]`` all of an expert with
    a holder there.
    """
    held = topology.sum_nodes((placement.matrix > 0).T.astype(np.int64)) > 0
    lengths = np.zeros((topology.world_size, topology.world_size), dtype=np.int64)
    most = counts @ held.T + 1 + topology.node_sizes
    np.put_along_axis(lengths, relays_of(topology), most, axis=1)
    return lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaving:
    """The rows and messages that a rank sends."""

    send_index: Ints  # which row goes at each position of the send buffer, int64 ``[U]``
    sent: Ints  # rows to each rank, int64 ``[W]``
    # For the relays, rank by rank: how many rows come, how many copies go to each rank of the node, and for each copy
    # the row that it is of; then zeros.
    messages: NDArray[np.int32]


def leaving(tokens: Ints, sent: Ints, send_index: Ints, lengths: Ints, topology: Topology, rank: int) -> Leaving:
    """Plan the rows and messages that ``rank`` sends to its relays.

    ``tokens`` ``[R]`` is the token of each row, ``sent`` ``[W]`` and ``send_index`` ``[C]`` are of the exchange of
    single rows, and ``lengths`` ``[W]`` of this rank's messages; all int64.
    """
    # Step 1: the first copy of each token for each node. Copies are ordered by (destination, slot).
    destinations = np.repeat(np.arange(len(sent)), sent)
    nodes, who = topology.nodes[destinations], tokens[send_index]
    if len(who):
        who = who - who.min()
    width = int(who.max()) + 1 if len(who) else 1
    keys = nodes * width + who
    number = np.empty(topology.num_nodes * width, dtype=np.int64)
    copies = np.arange(len(keys))
    # The last write of equal keys stays, so they are written from the back.
    number[keys[::-1]] = copies[::-1]
    firsts = copies[number[keys] == copies]

    # Step 2: these leave, relay by relay. From here on ``number`` is the place of a row in its relay's part.
    mine = relays_of(topology)[rank]
    relays = mine[nodes[firsts]]
    order = np.argsort(relays, kind="stable")
    firsts, relays = firsts[order], relays[order]
    leave = np.bincount(relays, minlength=len(sent)).astype(np.int64)
    number[keys[firsts]] = np.arange(len(firsts)) - (np.cumsum(leave) - leave)[relays]

    # Step 3: the message to each relay.
    messages = np.zeros(int(lengths.sum()), dtype=np.int32)
    starts = np.cumsum(lengths) - lengths
    for node, relay in enumerate(mine.tolist()):
        members = topology.members[node]
        rows = number[keys[nodes == node]]
        message = messages[starts[relay] : starts[relay] + lengths[relay]]
        message[0] = leave[relay]
        message[1 : 1 + len(members)] = sent[list(members)]
        message[1 + len(members) :][: len(rows)] = rows
    return Leaving(send_index=send_index[firsts], sent=leave, messages=messages)


@dataclass(frozen=True, kw_only=True, eq=False)
class Passing:
    """The copies that a rank passes on inside its node."""

    received: Ints  # rows from each rank in the first hop, int64 ``[W]``
    middle_index: Ints  # which received row goes at each position of the second send buffer, int64 ``[M]``
    sent: Ints  # copies to each rank in the second hop, int64 ``[W]``


def passing(messages: NDArray[np.int32], lengths: Ints, topology: Topology, rank: int) -> Passing:
    """Plan the copies that ``rank`` passes on for the ranks whose relay it is.

    ``messages``, int32, are from each rank, one behind the other, and ``lengths`` ``[W]`` theirs.
    """
    members = topology.members[topology.node_of[rank]]
    received, sent = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    copies: list[list[Ints]] = [[] for _ in members]
    starts, before = np.cumsum(lengths) - lengths, 0
    for source in np.flatnonzero(lengths).tolist():
        message = messages[starts[source] : starts[source] + lengths[source]].astype(np.int64)
        received[source], to_members = message[0], message[1 : 1 + len(members)]
        ends = 1 + len(members) + np.cumsum(to_members)
        for place, (end, count) in enumerate(zip(ends.tolist(), to_members.tolist(), strict=True)):
            copies[place].append(message[end - count : end] + before)
            sent[members[place]] += count
        before += int(received[source])
    parts = [part for of_member in copies for part in of_member]
    return Passing(
        received=received, middle_index=np.concatenate(parts) if parts else np.empty(0, dtype=np.int64), sent=sent
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Arriving:
    """The copies that a rank gets for its slots."""

    received: Ints  # copies from each rank in the second hop, int64 ``[W]``
    receive_index: Ints  # which of them goes at each position of the slot order, int64 ``[R']``


def arriving(received: Ints, receive_index: Ints, topology: Topology, rank: int) -> Arriving:
    """Plan the copies that ``rank`` gets, by relay, from rows by sender ``[W]`` and their order ``[R']``."""
    relays = relays_of(topology)[:, topology.node_of[rank]]
    sources = np.lexsort((np.arange(len(relays)), relays))
    starts = np.cumsum(received) - received
    # Each sender's rows stand together, senders in the order of their relays; ``position`` is where they stood in the
    # order of senders.
    position = join_segments(starts[sources], received[sources])
    moved = np.empty_like(position)
    moved[position] = np.arange(len(position))
    by_relay = np.bincount(relays, received, minlength=len(relays)).astype(np.int64)
    return Arriving(received=by_relay, receive_index=moved[receive_index])
