"""Rows per rank as even as the replicas allow, and replicas that allow it."""

from __future__ import annotations

import heapq

from hecate.runtime.owners import Owners
from hecate.runtime.planner.placement import Placement

# Sweeps end when the busiest rank is this close to a lower bound, or gets better by less than a thousandth.
# Against the linear program that costs 0.1 % on average (tests/runtime/planner/test_dispatch.py).
_SWEEPS = 20
_GOOD_ENOUGH = 1.005
_STALLED = 0.999


def balance(rows: list[int], placement: Placement) -> list[list[int]]:
    """How many rows of each expert each of its holders computes, so that the busiest rank has as few as possible.

    Block coordinate descent on the sum of squared rank loads: each expert in turn pours its rows over its holders
    like water over the others' levels. The least sum of squares over these simplices has the least maximum too.

    Args:
        rows: of each expert, length E.

    Returns:
        For each expert one number per holder, in the order of ``placement.holders``.
    """
    level = [0.0] * placement.owners.world_size
    split = [[total] for total in rows]
    shared = []
    for expert, ranks in enumerate(placement.holders):
        if len(ranks) == 1:
            level[ranks[0]] += rows[expert]
        else:
            shared.append(expert)
    bound = max(max(level), sum(rows) / len(level)) * _GOOD_ENOUGH
    shared.sort(key=lambda expert: (-rows[expert], expert))
    blocks = []
    for expert in shared:
        ranks = placement.holders[expert]
        share = rows[expert] / len(ranks)
        blocks.append((rows[expert], ranks, [share] * len(ranks)))
        for rank in ranks:
            level[rank] += share
    previous = float("inf")
    for _ in range(_SWEEPS if blocks else 0):
        for total, ranks, quota in blocks:
            _pour(total, ranks, quota, level)
        highest = max(level)
        if highest <= bound or highest > previous * _STALLED:
            break
        previous = highest
    if max(_whole(split, placement, shared, blocks)) > _owners_highest(rows, placement):
        # Whole rows, or an early end of the sweeps. Replicas must never make a step slower.
        for expert in shared:
            ranks = placement.holders[expert]
            split[expert] = [rows[expert] * (rank == placement.owners.ranks[expert]) for rank in ranks]
    return split


def _pour(rows: int, ranks: tuple[int, ...], quota: list[float], level: list[float]) -> None:
    """Take one expert's rows out of ``level`` and pour them back, so that the highest level it touches is lowest."""
    if len(ranks) == 2:
        first, second = ranks
        a, b = level[first] - quota[0], level[second] - quota[1]
        share = min(max((rows + b - a) / 2, 0.0), float(rows))
        quota[0], quota[1] = share, rows - share
        level[first], level[second] = a + share, b + quota[1]
        return
    below = [level[rank] - q for rank, q in zip(ranks, quota, strict=True)]
    surface, total = 0.0, float(rows)
    for count, height in enumerate(sorted(below), start=1):
        if count > 1 and height >= surface:
            break
        total += height
        surface = total / count
    for index, height in enumerate(below):
        quota[index] = max(surface - height, 0.0)
        level[ranks[index]] = height + quota[index]


def _whole(
    split: list[list[int]],
    placement: Placement,
    shared: list[int],
    blocks: list[tuple[int, tuple[int, ...], list[float]]],
) -> list[int]:
    """Round the quotas of ``blocks`` into ``split`` with the same sums; what is over goes to the emptier ranks.

    Returns the rows of each rank.
    """
    level = [0] * placement.owners.world_size
    for ranks, quotas in zip(placement.holders, split, strict=True):
        if len(ranks) == 1:
            level[ranks[0]] += quotas[0]
    rest = []
    for expert, (total, ranks, quota) in zip(shared, blocks, strict=True):
        split[expert] = whole = [int(q + 1e-9) for q in quota]
        for rank, count in zip(ranks, whole, strict=True):
            level[rank] += count
        rest.append(total - sum(whole))
    for expert, (_, ranks, _), missing in zip(shared, blocks, rest, strict=True):
        if missing:
            order = sorted(range(len(ranks)), key=lambda i: (level[ranks[i]], i))
            for turn in range(missing):
                index = order[turn % len(order)]
                split[expert][index] += 1
                level[ranks[index]] += 1
    return level


def _owners_highest(rows: list[int], placement: Placement) -> int:
    """Rows of the busiest rank if owners computed everything."""
    level = [0] * placement.owners.world_size
    for owner, count in zip(placement.owners.ranks, rows, strict=True):
        level[owner] += count
    return max(level)


def shed_excess(
    rows: list[int], owners: Owners, replicas: list[set[int]], free: list[int]
) -> tuple[Placement, list[list[int]]]:
    """Add replicas until no rank has more than its even share of rows, as far as slots allow.

    It starts from an even split over the holders. The rank with most rows gives rows of its hottest expert to the
    rank with fewest that has a free slot: its whole excess, or what the other lacks. So every replica brings one
    rank to the even share, and W - 1 are enough for all if slots allow.

    Args:
        rows: of each expert, length E.
        replicas: the ranks beside the owner that hold each expert; added to.
        free: slots left on each rank, length W; taken from.

    Returns:
        The placement, and the rows of each expert on each of its holders, in the order of ``holders``.
    """
    level = [0] * owners.world_size
    have: list[dict[int, int]] = [{} for _ in level]
    for expert, (owner, more, total) in enumerate(zip(owners.ranks, replicas, rows, strict=True)):
        if not more:
            level[owner] += total
            have[owner][expert] = total
            continue
        base, extra = divmod(total, len(more) + 1)
        for index, rank in enumerate(sorted({owner, *more})):
            level[rank] += base + (index < extra)
            have[rank][expert] = base + (index < extra)
    share = -(-sum(rows) // len(level))
    donors = [(-count, rank) for rank, count in enumerate(level) if count > share]
    takers = [(count, rank) for rank, count in enumerate(level) if count < share and free[rank]]
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
    placement = Placement.with_replicas(owners, replicas)
    split = [
        [have[rank].get(expert, 0) for rank in ranks] if len(ranks) > 1 else [rows[expert]]
        for expert, ranks in enumerate(placement.holders)
    ]
    return placement, split
