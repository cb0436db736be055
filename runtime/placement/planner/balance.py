"""Balance: split every expert's rows over its holders so that the busiest rank has few.

:func:`shed_excess` adds the replicas without which that is not possible. A rank's level is the number of rows that it
computes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.topology import Topology

# Sweeps end when the busiest rank is this close to a lower bound, or gets better by less than a thousandth. The bound
# is a numerator and a denominator: all numbers are whole, so that a GPU computes the same ones. Against the linear
# program that costs 0.1 % on average (tests/runtime/placement/planner/test_dispatch.py).
SWEEPS = 20
GOOD_ENOUGH = 1003, 1000
STALLED = 999, 1000

# Before levels even out, rows of an expert are divided at 2**32nds, so fewer than 2**31 rows fit into int64.
PARTS_BITS = 32


def local_split(rows: list[int], placement: Placement, topology: Topology) -> list[list[float]]:
    """Return each expert's rows on its holders if rows go to the nearest one, and ranks have equal shares.

    Holders in a node share its rows evenly; those of nodes without a holder are shared by all holders.
    """
    return [_split_local(total, ranks, topology) for total, ranks in zip(rows, placement.holders, strict=True)]


def _split_local(total: int, ranks: tuple[int, ...], topology: Topology) -> list[float]:
    if len(ranks) == 1 or topology.num_nodes == 1:
        return [total / len(ranks)] * len(ranks)
    weights = _local_weights(ranks, topology)
    part = total / sum(weights)
    return [part * weight for weight in weights]


def _local_weights(ranks: Sequence[int], topology: Topology, *, shares_rest: bool = True) -> list[int]:
    """Return numbers in proportion to the parts of the holders ``ranks`` in :func:`local_split`.

    Unless all share the rows of nodes without a holder, these are left out.
    """
    held: dict[int, int] = {}
    for rank in ranks:
        node = topology.node_of[rank]
        held[node] = held.get(node, 0) + 1
    sizes = topology.members
    away = topology.world_size - sum(len(sizes[node]) for node in held) if shares_rest else 0
    most = math.lcm(len(ranks), *held.values())
    return [
        len(sizes[node]) * (most // held[node]) + away * (most // len(ranks))
        for node in (topology.node_of[rank] for rank in ranks)
    ]


@lru_cache(maxsize=4096)
def local_ends(ranks: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """Return where each holder's part of an expert's rows ends in :func:`local_split`, on a length of 2**32.

    >>> [end / 2**PARTS_BITS for end in local_ends((0, 2, 3), Topology((0, 0, 1, 1)))]
    [0.5, 0.75, 1.0]

    Ends are rounded up, so that parts of equal weight get the same rows where these divide.
    """
    weights = _local_weights(ranks, topology)
    whole = sum(weights)
    return tuple(-(-(end << PARTS_BITS) // whole) for end in accumulate(weights))


def cut_at(total: int, ends: Sequence[int]) -> list[int]:
    """Cut ``total`` rows into whole parts that end at ``ends``, on a length of 2**32.

    >>> cut_at(7, [2**31, 3 * 2**30, 2**32])
    [3, 2, 2]
    """
    cuts = [0, *((total * end) >> PARTS_BITS for end in ends)]
    return [end - start for start, end in pairwise(cuts)]


def balance(rows: list[int], placement: Placement, topology: Topology) -> list[list[int]]:
    """Return whole rows of each expert on each of its holders so that the busiest rank has as few as possible.

    Block coordinate descent on the sum of squared levels, from :func:`local_split`: one after the other, each expert
    with a holder that has too many rows splits its rows anew, while all others stay. The least sum of squares over
    these simplices has the least maximum too. ``kernels/balance_rows`` finds the same. No rank has more rows than the
    busiest one would have if owners computed everything.
    """
    alone, blocks = [0] * placement.owners.world_size, []
    split = [[count] for count in rows]
    for expert, ranks in enumerate(placement.holders):
        if len(ranks) == 1:
            alone[ranks[0]] += rows[expert]
        else:
            # Changed in place while levels even out.
            split[expert] = quota = cut_at(rows[expert], local_ends(ranks, topology))
            blocks.append(Block(rows[expert], expert, ranks, quota))
    highest = max(even_out(alone, blocks))
    # Owners alone have at least the mean, so often there is nothing to compare with.
    if highest * len(alone) > sum(rows) and highest > max(placement.owners.rows(rows)):
        # Sweeps may end early. Replicas must never make a step slower.
        return owners_only(rows, placement)
    return split


def owners_only(rows: list[int], placement: Placement) -> list[list[int]]:
    """Return a split in which owners compute all rows of their experts, and other holders none."""
    return [
        [count] if len(ranks) == 1 else [count * (rank == owner) for rank in ranks]
        for count, ranks, owner in zip(rows, placement.holders, placement.owners.ranks, strict=True)
    ]


def balance_in_nodes(rows: list[int], placement: Placement, topology: Topology) -> list[list[int]]:
    """Balance rows as :func:`balance` does, but let no row leave a node that holds its expert.

    Rows are assumed to come in equal shares from every rank; as far as nodes route differently, rows travel. Those of
    nodes without a holder are shared by the nodes that have one.
    """
    alone, blocks, places = [0] * placement.owners.world_size, [], []
    split = [[count] for count in rows]
    for expert, ranks in enumerate(placement.holders):
        total = rows[expert]
        if len(ranks) == 1:
            alone[ranks[0]] += total
            continue
        split[expert] = [0] * len(ranks)
        held: dict[int, list[int]] = {}
        for index, rank in enumerate(ranks):
            held.setdefault(topology.node_of[rank], []).append(index)
        weights = [len(topology.members[node]) for node in held]
        for indices, count in zip(held.values(), _shares(total, weights), strict=True):
            if len(indices) == 1:
                alone[ranks[indices[0]]] += count
                split[expert][indices[0]] = count
            else:
                quota = _shares(count, [1] * len(indices))
                blocks.append(Block(count, expert, tuple(ranks[index] for index in indices), quota))
                places.append((expert, indices, quota))
    even_out(alone, blocks)
    for expert, indices, quota in places:
        for index, count in zip(indices, quota, strict=True):
            split[expert][index] = count
    return split


def _shares(total: int, weights: list[int]) -> list[int]:
    """Divide ``total`` into whole parts in proportion to ``weights``."""
    ends = list(accumulate(weights, initial=0))
    return [total * end // ends[-1] - total * start // ends[-1] for start, end in pairwise(ends)]


class Block(NamedTuple):
    """Rows of one expert, and holders among which they may be shared in any way."""

    rows: int
    expert: int
    ranks: tuple[int, ...]  # ascending
    quota: list[int]  # rows of each holder, changed while levels even out


def even_out(alone: list[int], blocks: list[Block]) -> list[int]:
    """Split the rows of each block so that the highest level is low, and return the rows of each rank.

    ``blocks`` get sorted; ``alone`` are the rows of each rank that no other rank can take.
    """
    level = alone.copy()
    blocks.sort(key=lambda block: (-block.rows, block.expert))
    for _, _, ranks, quota in blocks:
        for rank, count in zip(ranks, quota, strict=True):
            level[rank] += count
    least = max(max(alone), -(-sum(level) // len(level)))
    bound = least * GOOD_ENOUGH[0] // GOOD_ENOUGH[1]
    previous = max(level)
    for _ in range(SWEEPS):
        if previous <= bound:
            break
        for count, _, ranks, quota in blocks:
            for rank in ranks:
                if level[rank] > bound:
                    _split_anew(count, ranks, quota, level)
                    break
        highest = max(level)
        if highest * STALLED[1] > previous * STALLED[0]:
            break
        previous = highest
    return level


def _split_anew(rows: int, ranks: tuple[int, ...], quota: list[int], level: list[int]) -> None:
    """Split one expert's rows over its holders so that the highest of their levels is as low as it can be.

    Holders that get rows end at one common level, the surface; those above it get none. Rows that do not suffice to
    raise the surface by one go to the first of those that are not above it, one to each.
    """
    if len(ranks) == 2:
        first, second = ranks
        a, b = level[first] - quota[0], level[second] - quota[1]
        share = (rows + b - a + 1) // 2
        if share < 0:
            share = 0
        elif share > rows:
            share = rows
        quota[0], quota[1] = share, rows - share
        level[first], level[second] = a + share, b + rows - share
        return
    below = [level[rank] - q for rank, q in zip(ranks, quota, strict=True)]
    surface, total, sharing = 0, rows, 0
    for height in sorted(below):
        if sharing and height > surface:
            break
        total += height
        sharing += 1
        surface = total // sharing
    over = total - surface * sharing
    for index, height in enumerate(below):
        count = 0
        if height <= surface:
            count = surface - height
            if over:
                count += 1
                over -= 1
        quota[index] = count
        level[ranks[index]] = height + count


def shed_excess(
    rows: list[int], owners: Owners, replicas: list[set[int]], free: list[int], topology: Topology | None = None
) -> list[dict[int, int]]:
    """Add ``replicas`` until no rank has more than its even share of rows, as far as ``free`` slots allow.

    The rank with most rows gives rows of its hottest expert to the rank with fewest that has a free slot: its whole
    excess, or what the other lacks, or all rows of that expert. So every replica brings a rank to the even share or
    an expert to another rank. With a ``topology`` rows are split and given away inside nodes, as in
    :func:`balance_in_nodes`. Returns for each rank its rows of each expert that it holds.
    """
    level = [0] * owners.world_size
    have: list[dict[int, int]] = [{} for _ in level]
    for expert, (owner, more, total) in enumerate(zip(owners.ranks, replicas, rows, strict=True)):
        if not more:
            level[owner] += total
            have[owner][expert] = total
            continue
        ranks = sorted({owner, *more})
        for rank, count in zip(ranks, _split_whole(total, ranks, topology), strict=True):
            level[rank] += count
            have[rank][expert] = count
    even = -(-sum(rows) // len(level))
    for members in (range(len(level)),) if topology is None else topology.members:
        share = max(even, -(-sum(level[rank] for rank in members) // len(members)))
        _move_excess(members, share, level, have, owners, replicas, free)
    return have


def _split_whole(total: int, ranks: list[int], topology: Topology | None) -> list[int]:
    """Divide whole rows evenly over the holders; with a topology first over nodes by their size."""
    even = [1] * len(ranks)
    return _shares(total, even if topology is None else _local_weights(ranks, topology, shares_rest=False))


def _move_excess(
    members: Sequence[int],
    share: int,
    level: list[int],
    have: list[dict[int, int]],
    owners: Owners,
    replicas: list[set[int]],
    free: list[int],
) -> None:
    """Move rows from ``members`` with more than ``share`` to those with fewer and a free slot, which get replicas."""
    donors = [(-level[rank], rank) for rank in members if level[rank] > share]
    takers = [(level[rank], rank) for rank in members if level[rank] < share and free[rank]]
    heapq.heapify(donors)
    heapq.heapify(takers)
    while donors and takers:
        count, donor = heapq.heappop(donors)
        _, taker = heapq.heappop(takers)
        expert = max(have[donor], key=lambda e: (have[donor][e], -e))
        moved = min(-count - share, share - level[taker], have[donor][expert])
        have[donor][expert] -= moved
        have[taker][expert] = have[taker].get(expert, 0) + moved
        level[donor] -= moved
        level[taker] += moved
        if taker not in replicas[expert] and taker != owners.ranks[expert]:
            replicas[expert].add(taker)
            free[taker] -= 1
        if level[donor] > share:
            heapq.heappush(donors, (-level[donor], donor))
        if level[taker] < share and free[taker]:
            heapq.heappush(takers, (level[taker], taker))
