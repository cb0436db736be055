"""Assign: decide how many rows of each expert each rank sends to each of its holders."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Bools, Placement, changes
from hecate.runtime.placement.planner.balance import balance
from hecate.runtime.placement.topology import Topology

Dispatch = Literal["nearest", "balanced"]


@dataclass(frozen=True, eq=False)
class Quotas:
    """A rank's part of the exchange. Rank r's rows for d are those that d expects from r: both compute them alone.

    Attributes:
        sent: rows of ``rank`` for each expert's holders, in the order of ``placement.pairs``, int64 ``[n]``.
        received: rows from each rank for each slot of ``rank``, int64 ``[S, W]``.
    """

    placement: Placement
    rank: int
    sent: Ints
    received: Ints

    def __post_init__(self) -> None:
        for name in ("sent", "received"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.int64))

    @classmethod
    def from_matrices(cls, placement: Placement, rank: int, sends: Ints, receives: Ints) -> Quotas:
        """Return the quotas with these :attr:`sends` and :attr:`receives`.

        Raises:
            ValueError: a shape does not fit, or an expert's rows go to a rank that does not hold it.
        """
        shape = placement.owners.num_experts, placement.owners.world_size
        if sends.shape != shape or receives.shape != shape[::-1]:
            shapes = f"sends {list(sends.shape)} and receives {list(receives.shape)}"
            raise ValueError(f"hecate.Quotas: {shapes}, not {list(shape)} and {list(shape[::-1])}")
        quotas = cls(placement, rank, sends[placement.pairs], receives.T[placement.slots_on(rank)])
        for name, given, kept in (("sends", sends, quotas.sends), ("receives", receives.T, quotas.receives.T)):
            if (wrong := (given != kept).any(1)).any():
                expert = int(np.argmax(wrong))
                raise ValueError(
                    f"hecate.Quotas: rank {rank} {name} {given[expert].tolist()} of expert {expert}, which ranks "
                    f"{list(placement.holders[expert])} hold"
                )
        return quotas

    @property
    def sends(self) -> Ints:
        """Rows of each expert to each rank, int64 ``[E, W]``."""
        sends = np.zeros((self.placement.owners.num_experts, self.placement.owners.world_size), dtype=np.int64)
        sends[self.placement.pairs] = self.sent
        return sends

    @property
    def receives(self) -> Ints:
        """Rows from each rank of each expert, int64 ``[W, E]``."""
        receives = np.zeros((self.placement.owners.world_size, self.placement.owners.num_experts), dtype=np.int64)
        receives[:, self.placement.slots_on(self.rank)] = self.received.T
        return receives


def assign_tokens(
    counts: Ints,
    placement: Placement,
    topology: Topology,
    rank: int,
    how: Dispatch = "balanced",
    split: list[list[int]] | None = None,
) -> Quotas:
    """Split every rank's rows ``counts`` ``[W, E]`` over the experts' holders, and return the part of ``rank``.

    ``"nearest"`` is the paper's rule (section 4), which can leave a rank overloaded. ``"balanced"`` meets ``split``,
    rows of each expert on its holders, by default from :func:`balance`; within that rows stay local, then in the
    node.
    """
    if placement.num_replicas == 0:
        return _to_owners(counts, placement, rank)
    if how == "nearest":
        return _nearest(counts, placement, topology, rank)
    return _balanced(counts, placement, topology, rank, split)


def rows_per_rank(counts: Ints, placement: Placement, topology: Topology, how: Dispatch = "balanced") -> Ints:
    """Return the rows that each rank computes, int64 ``[W]``."""
    if how == "balanced" or placement.num_replicas == 0:
        return quota_matrix(balance(counts.sum(0).tolist(), placement, topology), placement).sum(0)
    total = np.zeros(topology.world_size, dtype=np.int64)
    for rank in range(topology.world_size):
        total += _even_split(counts[rank], _eligible(placement, topology, rank), rank).sum(0)
    return total


def _to_owners(counts: Ints, placement: Placement, rank: int) -> Quotas:
    return Quotas(placement, rank, counts[rank].copy(), counts.T[placement.slots_on(rank)])


# --- the paper's rule ---


def _nearest(counts: Ints, placement: Placement, topology: Topology, rank: int) -> Quotas:
    """Let a local holder take all local rows; else holders in the node share them evenly; else all holders do."""
    sends = _even_split(counts[rank], _eligible(placement, topology, rank), rank)
    # Rows of other ranks by the same rule, seen from this rank, for its slots: ``[S, W]``.
    slots = placement.slots_on(rank)
    holds = placement.matrix[slots] > 0
    near = topology.sum_nodes(holds.T.astype(np.int64))[topology.nodes].T
    in_node = topology.nodes == topology.node_of[rank]
    shares = np.where(near > 0, near, holds.sum(1)[:, None])
    before = holds & (np.arange(topology.world_size) < rank)
    index = np.where(near > 0, (before & in_node).sum(1)[:, None], before.sum(1)[:, None])
    base, extra = np.divmod(counts.T[slots], shares)
    turned = (index - np.arange(topology.world_size)) % shares
    received = np.where(~holds & ((near == 0) | in_node), base + (turned < extra), 0)
    received[:, rank] = counts[rank, slots]
    return Quotas(placement, rank, sends[placement.pairs], received)


def _eligible(placement: Placement, topology: Topology, source: int) -> Bools:
    """Return the holders among which the rows of ``source`` are split: bool ``[E, W]``."""
    holders = placement.matrix > 0
    in_node = holders & (topology.nodes == topology.node_of[source])
    eligible = np.where(in_node.any(1, keepdims=True), in_node, holders)
    local = holders[:, source]
    eligible[local] = False
    eligible[local, source] = True
    return eligible


def _even_split(rows: Ints, eligible: Bools, rotation: int) -> Ints:
    """Split ``rows`` ``[E]`` evenly over the eligible ranks ``[E, W]``; remainders start at ``rotation``."""
    shares = np.maximum(eligible.sum(1), 1)
    base, extra = np.divmod(rows, shares)
    index = np.cumsum(eligible, 1) - 1
    turned = (index - rotation) % shares[:, None]
    split: Ints = np.where(eligible, base[:, None] + (turned < extra[:, None]), 0)
    return split


# --- the balanced rule ---


def _balanced(
    counts: Ints, placement: Placement, topology: Topology, rank: int, split: list[list[int]] | None
) -> Quotas:
    """Meet the balanced quotas with as many local rows as possible, then rows of the node, then any."""
    if split is None:
        split = balance(counts.sum(0).tolist(), placement, topology)
    experts, ranks = placement.pairs
    quota = np.fromiter(chain.from_iterable(split), dtype=np.int64, count=len(ranks))
    # By node first, so that a node's ranks stand side by side.
    order = slice(None) if topology.in_order else np.lexsort((topology.position[ranks], experts))
    wanted, sent = Wanted(experts[order], ranks[order], quota[order]), np.empty_like(quota)
    sent[order] = sent_of(counts, wanted, topology, rank)
    return Quotas(placement, rank, sent, received_of(counts, wanted, placement.slots_on(rank), topology, rank))


class Wanted(NamedTuple):
    """What holders are to compute: ``ranks[i]`` has ``quota[i]`` rows of ``experts[i]``, all int64 ``[n]``.

    They are ordered by expert, node and rank, name all holders with rows, and are as many rows as ranks have.
    """

    experts: Ints
    ranks: Ints
    quota: Ints


def sent_of(counts: Ints, wanted: Wanted, topology: Topology, rank: int) -> Ints:
    """Return how many of the rows of ``rank`` each of the holders gets, ``[n]``; ranks have ``counts`` ``[W, E]``.

    First every rank keeps what it may. Then the rows of an expert that ranks have left lie on one line, rank by rank,
    and those that its holders still want on another, holder by holder. As many rows as the segment of a rank and that
    of a holder have in common go from the one to the other.

    >>> counts, quota = np.array([[5, 2], [7, 0]]), np.array([8, 4, 2])
    >>> wanted, topology = Wanted(np.array([0, 0, 1]), np.array([0, 1, 1]), quota), Topology.even(2, 2)
    >>> sent_of(counts, wanted, topology, rank=0).tolist()
    [5, 0, 2]
    >>> sent_of(counts, wanted, topology, rank=1).tolist()
    [3, 4, 0]
    """
    experts, ranks, quota = wanted
    # Step 1: rows stay where they are.
    kept = np.minimum(counts[ranks, experts], quota)
    want = quota - kept
    mine = ranks == rank
    sent = np.where(mine, kept, 0)
    left = counts[rank].copy()
    left[experts[mine]] -= kept[mine]
    if 1 < topology.num_nodes < topology.world_size:
        # Step 2: inside every node.
        met, want, lead, left = _sent_in_node(counts, experts, ranks, kept, want, left, topology, rank)
        sent += met
    else:
        earlier = topology.position < topology.position[rank]
        lead = _left_together(counts, experts, ranks, kept, earlier)
    # Step 3: anywhere. This rank's segment begins after the rows that the ranks before it have left, which is
    # ``lead``.
    ends = _running(want, experts)
    return sent + _common(ends - want, ends, lead[experts], (lead + left)[experts])


class _AfterNodes(NamedTuple):
    """State of :func:`sent_of` when rows have been sent inside nodes."""

    met: Ints  # rows of the rank that each holder got in this step, ``[n]``
    want: Ints  # rows that each holder still wants, ``[n]``
    lead: Ints  # rows of each expert that the ranks before the rank have left together, ``[E]``
    left: Ints  # rows of each expert that the rank has left, ``[E]``


def _sent_in_node(
    counts: Ints, experts: Ints, ranks: Ints, kept: Ints, want: Ints, left: Ints, topology: Topology, rank: int
) -> _AfterNodes:
    """Do step 2 of :func:`sent_of`: on the two lines of each node the first ``amount`` rows meet."""
    num_nodes, num_experts = topology.num_nodes, counts.shape[1]
    here, node = topology.node_of[rank], topology.nodes[ranks]
    # For each expert on each node: rows that ranks there have left, that holders there want, and that meet, all
    # ``[N, E]``.
    visits = node * num_experts + experts
    have = topology.sum_nodes(counts) - _sums(visits, kept, num_nodes * num_experts).reshape(-1, num_experts)
    wanted = _sums(visits, want, num_nodes * num_experts).reshape(-1, num_experts)
    amount = np.minimum(have, wanted)
    # This rank's segments, ``[E]``, and those of all holders on their nodes' lines, ``[n]``.
    earlier = (topology.nodes == here) & (np.arange(topology.world_size) < rank)
    before = _left_together(counts, experts, ranks, kept, earlier)
    start, end = np.minimum(before, amount[here]), np.minimum(before + left, amount[here])
    running, most = _running(want, visits), amount[node, experts]
    starts, ends = np.minimum(running - want, most), np.minimum(running, most)
    return _AfterNodes(
        met=np.where(node == here, _common(starts, ends, start[experts], end[experts]), 0),
        want=want - (ends - starts),
        lead=(have - amount)[:here].sum(0) + before - start,
        left=left - (end - start),
    )


def _left_together(counts: Ints, experts: Ints, ranks: Ints, kept: Ints, which: Bools) -> Ints:
    """Return rows of each expert ``[E]`` that the ranks ``which`` ``[W]`` have left when each has kept its own."""
    return counts[which].sum(0) - _sums(experts, np.where(which[ranks], kept, 0), counts.shape[1])


def received_of(counts: Ints, wanted: Wanted, slots: Ints, topology: Topology, rank: int) -> Ints:
    """Return the rows of the experts ``slots`` that ``rank`` gets from each rank, ``[S, W]``.

    This is :func:`sent_of`, seen from the holder.
    """
    demand = np.zeros(counts.T.shape, dtype=np.int64)
    demand[wanted.experts, wanted.ranks] = wanted.quota
    have, want = counts.T[slots], demand[slots]
    kept = np.minimum(have, want)
    have, want = have - kept, want - kept
    got = np.zeros_like(have)
    got[:, rank] = kept[:, rank]
    if 1 < topology.num_nodes < topology.world_size:
        a, b = topology.split_by_node(have), topology.split_by_node(want)
        amount = np.minimum(a.sum(-1), b.sum(-1))
        a, b = _first(a, amount), _first(b, amount)
        node = topology.node_of[rank]
        members = list(topology.members[node])
        got[:, members] += _overlap(b[:, node], a[:, node], members.index(rank))[:, : len(members)]
        have = have - topology.join_nodes(a)
        want = want - topology.join_nodes(b)
    if topology.in_order:
        return got + _overlap(want, have, rank)
    order = np.argsort(topology.position)
    got[:, order] += _overlap(want[:, order], have[:, order], int(topology.position[rank]))
    return got


def _sums(keys: Ints, values: Ints, size: int) -> Ints:
    """Return the sum of the values of each key, ``[size]``. It is exact: rows are far below 2**53."""
    return np.bincount(keys, values, minlength=size).astype(np.int64)


def _running(values: Ints, keys: Ints) -> Ints:
    """Return running sums that start anew at each new key; equal keys stand together."""
    total = np.cumsum(values)
    # Sums before a key never fall, so the last of them is the largest so far.
    return total - np.maximum.accumulate(np.where(changes(keys), total - values, 0))


def _common(start: Ints, end: Ints, other_start: Ints, other_end: Ints) -> Ints:
    """Return the length of the common part of two segments."""
    return np.maximum(np.minimum(end, other_end) - np.maximum(start, other_start), 0)


def _first(values: Ints, amount: Ints) -> Ints:
    """Return the first ``amount[...]`` of each line of ``values`` ``[..., n]``."""
    return _steps(np.minimum(np.cumsum(values, -1), amount[..., None]))


def _overlap(mine: Ints, theirs: Ints, index: int) -> Ints:
    """Return how much of the segment ``mine[:, index]`` meets each of ``theirs``, both ``[n, k]``, side by side."""
    end = mine[:, : index + 1].sum(1)
    start = end - mine[:, index]
    met = _steps(np.minimum(np.maximum(np.cumsum(theirs, 1), start[:, None]), end[:, None]))
    met[:, 0] -= start
    return met


def _steps(ends: Ints) -> Ints:
    """Return by how much each value of a line exceeds the one before; the first exceeds zero."""
    steps = ends.copy()
    steps[..., 1:] -= ends[..., :-1]
    return steps


def quota_matrix(split: list[list[int]], placement: Placement) -> Ints:
    """Return the rows of each expert on its holders as int64 ``[E, W]``."""
    quotas = np.zeros((len(split), placement.owners.world_size), dtype=np.int64)
    quotas[placement.pairs] = np.fromiter(chain.from_iterable(split), dtype=np.int64)
    return quotas
