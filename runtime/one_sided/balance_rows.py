"""Balance on the device: how many rows of each expert each holder computes, as the planner's ``balance`` finds them.

The first kernel has a program for each expert, and splits its rows where the planner starts. The second is one
program whose lanes are the ranks, since each expert's split depends on those before it. It takes as long as its
longest chain, so it uses 32 bits, whose sums and quotients are short.
"""

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.operands import check_index
from hecate.runtime.one_sided.links import MOST_RANKS
from hecate.runtime.placement.planner.balance import (
    GOOD_ENOUGH,
    PARTS_BITS,
    STALLED,
    SWEEPS,
    Block,
    cut_at,
    even_out,
)

# A single configuration each: a few microseconds are not worth a trial. Sums over ranks stay inside a warp.
START_CONFIGS = ({"BLOCK": 128, "num_warps": 1},)
EVEN_OUT_CONFIGS = ({"BLOCK": 16, "num_warps": 1},)


def balance_rows(counts: Tensor, owners: Tensor, replicated: Tensor, parts: Tensor) -> Tensor:
    """Split each expert's rows over its holders, so that the busiest rank has as few as possible.

    Both ranks hold expert 0, and rank 0 alone expert 1. Of 14 rows each computes 7.

    >>> counts, owners = torch.tensor([[5, 2], [7, 0]]), torch.tensor([0, 0])
    >>> balance_rows(counts, owners, torch.tensor([0]), torch.tensor([[0, 2**31, 2**32]])).tolist()
    [[5, 7], [2, 0]]

    Args:
        counts: rows that each rank has for each expert, int64 ``[W, E]``; fewer than 2**31 together, which is not
            checked.
        owners: of each expert, int64 ``[E]``.
        replicated: the experts with more than one holder, ascending, int64 ``[n]``.
        parts: where each rank's part of each of them begins and ends at first, int64 ``[n, W + 1]`` from 0 to 2**32,
            as in ``local_ends``; the parts of ranks that do not hold it are empty.

    Returns:
        Rows of each expert that each rank computes, int64 ``[E, W]``. No rank has more than the busiest one would
        have if owners computed everything.

    Raises:
        TypeError: a tensor is not int64.
        ValueError: a shape or a device does not fit.
    """
    if counts.dim() != 2 or counts.shape[0] == 0:
        raise ValueError(f"balance_rows: expected counts [W, E], got {list(counts.shape)}")
    ranks, experts = counts.shape
    if not counts.dtype == parts.dtype == torch.int64:
        raise TypeError(f"balance_rows: expected numbers of int64, got {counts.dtype}, {parts.dtype}")
    check_index("balance_rows", owners, counts.device, experts)
    check_index("balance_rows", replicated, counts.device)
    blocks = replicated.shape[0]
    if parts.shape != (blocks, ranks + 1) or parts.device != counts.device:
        raise ValueError(
            f"balance_rows: expected parts {[blocks, ranks + 1]} on {counts.device}, got {list(parts.shape)} on "
            f"{parts.device}"
        )
    if not runs_on(counts.device) or ranks > MOST_RANKS:
        return balance_rows_reference(counts, owners, replicated, parts)
    wanted = counts.new_empty(experts, ranks)
    if experts == 0:
        return wanted
    totals, owners, lanes = counts.sum(0), owners.contiguous(), 1 << (ranks - 1).bit_length()
    order, rows = torch.empty_like(replicated), counts.new_empty(blocks, dtype=torch.int32)
    quota = counts.new_empty(blocks, ranks, dtype=torch.int32)
    launch(
        _start,
        lambda meta: experts + blocks,
        totals,
        owners,
        replicated.contiguous(),
        parts.contiguous(),
        wanted,
        order,
        rows,
        quota,
        ranks,
        experts,
        blocks,
        RANKS=lanes,
        BITS=PARTS_BITS,
    )
    if blocks > 0:
        launch(
            _even_out,
            lambda meta: 1,
            totals,
            owners,
            order,
            rows,
            quota,
            wanted,
            ranks,
            experts,
            blocks,
            RANKS=lanes,
            SWEEPS=SWEEPS,
            GOOD=GOOD_ENOUGH[0],
            OF=GOOD_ENOUGH[1],
            SLOW=STALLED[0],
            THAN=STALLED[1],
        )
    return wanted


def balance_rows_reference(counts: Tensor, owners: Tensor, replicated: Tensor, parts: Tensor) -> Tensor:
    """Balance rows as :func:`balance_rows` does, by the planner's own sweeps on the host."""
    totals = counts.sum(0)
    alone = torch.zeros_like(counts[:, :1]).view(-1).index_add_(0, owners, totals)
    busiest = int(alone.max())
    alone.index_add_(0, owners[replicated], -totals[replicated])
    blocks = []
    for expert, ends in zip(replicated.tolist(), parts.tolist(), strict=True):
        total = int(totals[expert])
        holders = tuple(rank for rank in range(len(alone)) if ends[rank] < ends[rank + 1])
        blocks.append(Block(total, expert, holders, cut_at(total, [ends[rank + 1] for rank in holders])))
    highest = max(even_out(alone.tolist(), blocks))
    wanted = counts.new_zeros(len(totals), len(alone)).scatter_(1, owners[:, None], totals[:, None])
    if highest > busiest:
        return wanted
    split = torch.zeros((len(blocks), len(alone)), dtype=torch.int64, device="cpu")
    for line, block in enumerate(blocks):
        for rank, count in zip(block.ranks, block.quota, strict=True):
            split[line, rank] = count
    experts = torch.tensor([block.expert for block in blocks], dtype=torch.int64, device="cpu")
    wanted.index_copy_(0, torch.empty_like(replicated).copy_(experts), wanted.new_empty(split.shape).copy_(split))
    return wanted


@tuned(START_CONFIGS, key=[], varying=["ranks", "experts", "blocks"])
def _start(
    totals,
    owners,
    replicated,
    parts,
    wanted,
    order,
    rows,
    quota,
    ranks,
    experts,
    blocks,
    RANKS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    inside = rank < ranks
    if program < experts:
        total = tl.load(totals + program)
        owner = tl.load(owners + program)
        tl.store(wanted + program * ranks + rank, tl.where(rank == owner, total, 0), mask=inside)
    else:
        block = program - experts
        expert = tl.load(replicated + block)
        total = tl.load(totals + expert)
        # The place of this block when those with most rows come first.
        place = block * 0
        for begin in range(0, blocks, BLOCK):
            other = begin + tl.arange(0, BLOCK)
            there = other < blocks
            which = tl.load(replicated + other, mask=there, other=0)
            theirs = tl.load(totals + which, mask=there, other=-1)
            hotter = (theirs > total) | ((theirs == total) & (which < expert))
            place += tl.sum((there & hotter).to(tl.int32), 0)
        line = parts + block * (ranks + 1) + rank
        first = tl.load(line, mask=inside, other=0)
        last = tl.load(line + 1, mask=inside, other=0)
        count = ((total * last) >> BITS) - ((total * first) >> BITS)
        # -1 where a rank does not hold it.
        tl.store(quota + place * ranks + rank, tl.where(last > first, count, -1).to(tl.int32), mask=inside)
        tl.store(order + place, expert)
        tl.store(rows + place, total.to(tl.int32))


@tuned(EVEN_OUT_CONFIGS, key=[], varying=["ranks", "experts", "blocks"])
def _even_out(
    totals,
    owners,
    order,
    rows,
    quota,
    wanted,
    ranks,
    experts,
    blocks,
    RANKS: tl.constexpr,
    SWEEPS: tl.constexpr,
    GOOD: tl.constexpr,
    OF: tl.constexpr,
    SLOW: tl.constexpr,
    THAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rank = tl.arange(0, RANKS)
    inside = rank < ranks
    line = tl.arange(0, BLOCK)
    # Rows of each rank if owners compute everything, rows that no other rank can take, and the rank's level.
    owned = tl.zeros((RANKS,), dtype=tl.int32)
    for begin in range(0, experts, BLOCK):
        expert = begin + line
        owner = tl.load(owners + expert, mask=expert < experts, other=-1)
        total = tl.load(totals + expert, mask=expert < experts, other=0).to(tl.int32)
        owned += tl.sum(tl.where(owner[:, None] == rank[None, :], total[:, None], 0), 0)
    alone = owned
    level = tl.zeros((RANKS,), dtype=tl.int32)
    for begin in range(0, blocks, BLOCK):
        block = begin + line
        there = block < blocks
        owner = tl.load(owners + tl.load(order + block, mask=there, other=0), mask=there, other=-1)
        total = tl.load(rows + block, mask=there, other=0)
        alone -= tl.sum(tl.where(owner[:, None] == rank[None, :], total[:, None], 0), 0)
        part = tl.load(quota + block[:, None] * ranks + rank[None, :], mask=there[:, None] & inside[None, :], other=0)
        level += tl.sum(tl.maximum(part, 0), 0)
    level += alone
    least = tl.maximum(tl.max(alone, 0), (tl.sum(level, 0) + ranks - 1) // ranks)
    bound = (least.to(tl.int64) * GOOD // OF).to(tl.int32)

    previous = tl.max(level, 0)
    sweep = 0
    while (sweep < SWEEPS) & (previous > bound):
        for block in range(blocks):
            at = quota + block * ranks + rank
            mine = tl.load(at, mask=inside, other=-1)
            total = tl.load(rows + block)
            holds = mine >= 0
            if tl.max((holds & (level > bound)).to(tl.int32), 0) > 0:
                below = level - mine
                # The surface if all share. A rank above it gets no rows, which lowers it, until no rank is above it.
                under = holds
                sharing = tl.sum(under.to(tl.int32), 0)
                whole = total + tl.sum(tl.where(under, below, 0), 0)
                surface = whole // sharing
                under = under & (below <= surface)
                left = tl.sum(under.to(tl.int32), 0)
                while left < sharing:
                    sharing = left
                    whole = total + tl.sum(tl.where(under, below, 0), 0)
                    surface = whole // sharing
                    under = under & (below <= surface)
                    left = tl.sum(under.to(tl.int32), 0)
                # The remainder goes to the first ranks, a row to each.
                more = tl.cumsum(under.to(tl.int32), 0) <= whole - surface * sharing
                mine = tl.where(under, surface - below + more.to(tl.int32), 0)
                level = tl.where(holds, below + mine, level)
                tl.store(at, mine, mask=holds)
        # The next sweep reads the numbers that this one wrote, maybe in other lanes.
        tl.debug_barrier()
        highest = tl.max(level, 0)
        stalled = highest.to(tl.int64) * THAN > previous.to(tl.int64) * SLOW
        previous = highest
        sweep = tl.where(stalled, SWEEPS, sweep + 1)

    # Otherwise owners have all rows, as they are written already.
    if previous <= tl.max(owned, 0):
        for begin in range(0, blocks, BLOCK):
            block = begin + line
            there = (block < blocks)[:, None] & inside[None, :]
            expert = tl.load(order + block, mask=block < blocks, other=0)
            part = tl.load(quota + block[:, None] * ranks + rank[None, :], mask=there, other=0)
            tl.store(wanted + expert[:, None] * ranks + rank[None, :], tl.maximum(part, 0).to(tl.int64), mask=there)
