"""Which holder computes which rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Bools, Placement, changes
from hecate.runtime.placement.planner.balance import balance
from hecate.runtime.placement.planner.fastest import quota_matrix
from hecate.runtime.placement.topology import Topology

Dispatch = Literal["nearest", "balanced"]


@dataclass(frozen=True, eq=False)
class Quotas:
    """One rank's part of the exchange. What rank r sends to d, rank d expects from r: both compute it alone.

    Attributes:
        sends: rows of each expert to each rank, int64 ``[E, W]``.
        receives: rows from each rank of each expert, int64 ``[W, E]``.
    """

    sends: Ints
    receives: Ints


def assign_tokens(
    counts: Ints,
    placement: Placement,
    topology: Topology,
    rank: int,
    how: Dispatch = "balanced",
    split: list[list[int]] | None = None,
) -> Quotas:
    """Split every rank's rows of every expert over the expert's holders.

    ``"nearest"`` is the paper's rule (section 4): a local holder takes all local rows; else the holders in the node
    share them evenly; else all holders do. It can leave a rank overloaded. ``"balanced"`` meets ``split``, by default
    with the fewest rows on the busiest rank; within that it keeps rows local, then in the node.

    Args:
        counts: rows that each rank has for each expert, int64 ``[W, E]``.
        rank: whose part to return.
        split: rows of each expert on each of its holders; by default the result of :func:`balance`.
    """
    if placement.num_replicas == 0:
        return _to_owners(counts, placement, rank)
    if how == "nearest":
        return _nearest(counts, placement, topology, rank)
    return _balanced(counts, placement, topology, rank, split)


def rows_per_rank(counts: Ints, placement: Placement, topology: Topology, how: Dispatch = "balanced") -> Ints:
    """Rows that each rank computes, int64 ``[W]``."""
    if how == "balanced" or placement.num_replicas == 0:
        return quota_matrix(balance(counts.sum(0).tolist(), placement, topology), placement).sum(0)
    total = np.zeros(topology.world_size, dtype=np.int64)
    for rank in range(topology.world_size):
        total += _even_split(counts[rank], _eligible(placement, topology, rank), rank).sum(0)
    return total


def _to_owners(counts: Ints, placement: Placement, rank: int) -> Quotas:
    owners = placement.owner_array
    sends = np.zeros(counts.T.shape, dtype=np.int64)
    sends[np.arange(len(owners)), owners] = counts[rank]
    receives = np.zeros(counts.shape, dtype=np.int64)
    own = np.flatnonzero(owners == rank)
    receives[:, own] = counts[:, own]
    return Quotas(sends, receives)


# --- the paper's rule ---


def _nearest(counts: Ints, placement: Placement, topology: Topology, rank: int) -> Quotas:
    sends = _even_split(counts[rank], _eligible(placement, topology, rank), rank)
    # What the others send here, by the same rule seen from this rank, for the experts that it holds: ``[n, W]``.
    receives = np.zeros_like(counts)
    held = np.flatnonzero(placement.matrix[:, rank])
    holds = placement.matrix[held] > 0
    near = topology.sum_nodes(holds.T.astype(np.int64))[topology.nodes].T
    in_node = topology.nodes == topology.node_of[rank]
    shares = np.where(near > 0, near, holds.sum(1)[:, None])
    before = holds & (np.arange(topology.world_size) < rank)
    position = np.where(near > 0, (before & in_node).sum(1)[:, None], before.sum(1)[:, None])
    base, extra = np.divmod(counts.T[held], shares)
    turned = (position - np.arange(topology.world_size)) % shares
    rows = np.where(~holds & ((near == 0) | in_node), base + (turned < extra), 0)
    rows[:, rank] = counts[rank, held]
    receives[:, held] = rows.T
    return Quotas(sends, receives)


def _eligible(placement: Placement, topology: Topology, source: int) -> Bools:
    """The holders among which the rows of ``source`` are split: bool ``[E, W]``."""
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
    position = np.cumsum(eligible, 1) - 1
    turned = (position - rotation) % shares[:, None]
    split: Ints = np.where(eligible, base[:, None] + (turned < extra[:, None]), 0)
    return split


# --- the balanced rule ---


def _balanced(
    counts: Ints, placement: Placement, topology: Topology, rank: int, split: list[list[int]] | None
) -> Quotas:
    """Meet the balanced quotas with as many local rows as possible, then rows of the node, then any.

    Supply (rows that ranks have) and demand (rows that holders compute) of an expert meet like two lines of segments
    laid side by side, in rank order. Supply is everywhere and demand only at holders. So what a rank sends is found
    from the holders of all experts, and what it receives from all ranks' rows of the experts that it holds.
    """
    if split is None:
        split = balance(counts.sum(0).tolist(), placement, topology)
    experts, ranks = placement.pairs
    quota = np.fromiter(chain.from_iterable(split), dtype=np.int64, count=len(ranks))
    if not topology.in_order:
        # By node first, so that a node's ranks stand side by side.
        order = np.lexsort((topology.position[ranks], experts))
        experts, ranks, quota = experts[order], ranks[order], quota[order]
    sends = np.zeros(counts.T.shape, dtype=np.int64)
    sends[experts, ranks] = _sent(counts, experts, ranks, quota, topology, rank)
    receives = np.zeros(counts.shape, dtype=np.int64)
    demand = np.zeros(counts.T.shape, dtype=np.int64)
    demand[experts, ranks] = quota
    held = experts[ranks == rank]
    receives[:, held] = _received(counts.T[held], demand[held], topology, rank).T
    return Quotas(sends, receives)


def _sent(counts: Ints, experts: Ints, ranks: Ints, quota: Ints, topology: Topology, rank: int) -> Ints:
    """Rows of ``rank`` that each holder gets, ``[n]``: holder ``ranks[i]`` wants ``quota[i]`` of ``experts[i]``."""
    num_experts = counts.shape[1]
    position = topology.position
    # Step 1: rows stay where they are. ``lead``: what the ranks before this one have left.
    kept = np.minimum(counts[ranks, experts], quota)
    want = quota - kept
    mine = ranks == rank
    sent = np.where(mine, kept, 0)
    left = counts[rank].copy()
    left[experts[mine]] -= kept[mine]
    lead = np.zeros(num_experts, dtype=np.int64)
    node = topology.nodes[ranks]
    here = topology.node_of[rank]
    if 1 < topology.num_nodes < topology.world_size:
        # Step 2: inside every node.
        place = node * num_experts + experts
        size = topology.num_nodes * num_experts
        have = topology.sum_nodes(counts) - _sums(place, kept, size).reshape(-1, num_experts)
        wanted = _sums(place, want, size).reshape(-1, num_experts)
        amount = np.minimum(have, wanted)
        earlier = [other for other in topology.members[here] if other < rank]
        before = counts[earlier].sum(0) - _sums(
            experts, np.where((node == here) & (ranks < rank), kept, 0), num_experts
        )
        start, end = np.minimum(before, amount[here]), np.minimum(before + left, amount[here])
        most = amount[node, experts]
        running = _running(want, place)
        starts, ends = np.minimum(running - want, most), np.minimum(running, most)
        sent += np.where(node == here, _common(starts, ends, start[experts], end[experts]), 0)
        want = want - (ends - starts)
        left -= end - start
        lead = (have - amount)[:here].sum(0) + before - start
    else:
        earlier = position < position[rank]
        lead = counts[earlier].sum(0) - _sums(experts, np.where(earlier[ranks], kept, 0), num_experts)
    # Step 3: anywhere.
    ends = _running(want, experts)
    return sent + _common(ends - want, ends, lead[experts], (lead + left)[experts])


def _received(have: Ints, want: Ints, topology: Topology, rank: int) -> Ints:
    """Rows that ``rank`` gets from each rank, ``[n, W]``, of what ranks ``have`` and ``want``: both ``[n, W]``."""
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


def _sums(place: Ints, values: Ints, size: int) -> Ints:
    """The values that fall on each place, ``[size]``. Exact: rows are far below 2**53."""
    return np.bincount(place, values, minlength=size).astype(np.int64)


def _running(values: Ints, place: Ints) -> Ints:
    """Running sums that start anew at each new place; equal places stand together."""
    total = np.cumsum(values)
    # Sums before a place never fall, so the last of them is the largest so far.
    return total - np.maximum.accumulate(np.where(changes(place), total - values, 0))


def _common(start: Ints, end: Ints, other_start: Ints, other_end: Ints) -> Ints:
    """Length of the common part of two segments."""
    return np.maximum(np.minimum(end, other_end) - np.maximum(start, other_start), 0)


def _first(values: Ints, amount: Ints) -> Ints:
    """The first ``amount[...]`` of each line of ``values`` ``[..., n]``."""
    return _steps(np.minimum(np.cumsum(values, -1), amount[..., None]))


def _overlap(mine: Ints, theirs: Ints, index: int) -> Ints:
    """How much of the segment ``mine[:, index]`` meets each of ``theirs``, both ``[n, k]`` laid side by side."""
    end = mine[:, : index + 1].sum(1)
    start = end - mine[:, index]
    met = _steps(np.minimum(np.maximum(np.cumsum(theirs, 1), start[:, None]), end[:, None]))
    met[:, 0] -= start
    return met


def _steps(ends: Ints) -> Ints:
    """By how much each value of a line exceeds the one before; the first exceeds zero."""
    steps = ends.copy()
    steps[..., 1:] -= ends[..., :-1]
    return steps
