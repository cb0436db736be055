"""Splits on the device: who sends how many rows of each expert to whom."""

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm.collectives import on_device
from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.operands import check_index, check_turned
from hecate.runtime.one_sided.links import MOST_RANKS
from hecate.runtime.placement.planner.dispatch import Wanted, received_of, sent_of
from hecate.runtime.placement.topology import Topology

# A single configuration: a few microseconds are not worth a trial.
CONFIGS = ({"num_warps": 4},)


def split_rows(counts: Tensor, wanted: Tensor, order: Tensor, nodes: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return one rank's sends and receives, if as many rows as possible stay on their rank, and then on their node.

    Rows that are left lie on one line, rank by rank, and rows still wanted on another; where both lines meet, rows go
    from the one to the other. First each node has two such lines, then all ranks have two together.

    >>> counts, wanted = torch.tensor([[5, 2], [7, 0]]), torch.tensor([[8, 4], [0, 2]])
    >>> sends, receives = split_rows(counts, wanted, torch.tensor([0, 1]), torch.tensor([0, 0]), rank=0)
    >>> sends.tolist(), receives.tolist()
    ([[5, 0], [0, 2]], [[5, 0], [3, 0]])

    Args:
        counts: rows that each rank has for each expert, int64 ``[W, E]``.
        wanted: rows of each expert that each rank computes, int64 ``[E, W]``, as many as there are. Not checked.
        order: the ranks, node by node, int64 ``[W]``.
        nodes: the node of each of them, int64 ``[W]``.
        rank: whose part it is.

    Returns:
        Rows of each expert to each rank, int64 ``[E, W]``, and from each rank of each expert, int64 ``[W, E]``.

    Raises:
        TypeError: a tensor is not int64.
        ValueError: a shape or a device does not fit.
    """
    check_turned("split_rows", counts, wanted)
    ranks, experts = counts.shape
    check_index("split_rows", order, counts.device, ranks)
    check_index("split_rows", nodes, counts.device, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"split_rows: rank {rank} of {ranks}")
    if not runs_on(counts.device) or ranks > MOST_RANKS:
        return split_rows_reference(counts, wanted, order, nodes, rank)
    sends, receives = torch.empty_like(wanted.contiguous()), torch.empty_like(counts.contiguous())
    if experts > 0:
        launch(
            _split_rows,
            lambda meta: experts,
            counts.contiguous(),
            wanted.contiguous(),
            order.contiguous(),
            nodes.contiguous(),
            sends,
            receives,
            rank,
            ranks,
            experts,
            RANKS=1 << (ranks - 1).bit_length(),
        )
    return sends, receives


def split_rows_reference(
    counts: Tensor, wanted: Tensor, order: Tensor, nodes: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Split rows as :func:`split_rows` does, by the planner on the host."""
    topology = Topology(tuple(nodes[order.argsort()].tolist()))
    have, want, by_node = (numbers.cpu().numpy() for numbers in (counts, wanted, order))
    experts, ranks = np.repeat(np.arange(len(want)), len(have)), np.tile(by_node, len(want))
    of_holders = Wanted(experts, ranks, want[:, by_node].reshape(-1))
    sends = np.zeros_like(want)
    sends[experts, ranks] = sent_of(have, of_holders, topology, rank)
    receives = np.ascontiguousarray(received_of(have, of_holders, np.arange(len(want)), topology, rank).T)
    return on_device(sends, counts.device), on_device(receives, counts.device)


@tuned(CONFIGS, key=[], varying=["rank", "ranks", "experts"])
def _split_rows(counts, wanted, order, nodes, sends, receives, rank, ranks, experts, RANKS: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, RANKS)
    inside = p < ranks
    who = tl.load(order + p, mask=inside, other=0)
    node = tl.load(nodes + p, mask=inside, other=-1)
    have = tl.load(counts + who * experts + expert, mask=inside, other=0)
    want = tl.load(wanted + expert * ranks + who, mask=inside, other=0)
    me = inside & (who == rank)
    near = node == tl.sum(tl.where(me, node, 0), 0)

    # Step 1: rows stay where they are.
    kept = tl.minimum(have, want)
    have -= kept
    want -= kept
    sent = tl.where(me, kept, 0)
    got = sent

    # Step 2: in nodes. The lines of a node begin at its first rank.
    other = tl.load(nodes + p, mask=inside, other=-1)
    same = node[:, None] == other[None, :]
    earlier = same & (p[None, :] < p[:, None])
    amount = tl.minimum(tl.sum(tl.where(same, have[None, :], 0), 1), tl.sum(tl.where(same, want[None, :], 0), 1))
    before = tl.sum(tl.where(earlier, have[None, :], 0), 1)
    first, last = tl.minimum(before, amount), tl.minimum(before + have, amount)
    before = tl.sum(tl.where(earlier, want[None, :], 0), 1)
    start, end = tl.minimum(before, amount), tl.minimum(before + want, amount)
    my_first, my_last = tl.sum(tl.where(me, first, 0), 0), tl.sum(tl.where(me, last, 0), 0)
    my_start, my_end = tl.sum(tl.where(me, start, 0), 0), tl.sum(tl.where(me, end, 0), 0)
    sent += tl.where(near, tl.maximum(tl.minimum(end, my_last) - tl.maximum(start, my_first), 0), 0)
    got += tl.where(near, tl.maximum(tl.minimum(last, my_end) - tl.maximum(first, my_start), 0), 0)
    have -= last - first
    want -= end - start

    # Step 3: anywhere.
    last = tl.cumsum(have, 0)
    first = last - have
    end = tl.cumsum(want, 0)
    start = end - want
    my_first, my_last = tl.sum(tl.where(me, first, 0), 0), tl.sum(tl.where(me, last, 0), 0)
    my_start, my_end = tl.sum(tl.where(me, start, 0), 0), tl.sum(tl.where(me, end, 0), 0)
    sent += tl.maximum(tl.minimum(end, my_last) - tl.maximum(start, my_first), 0)
    got += tl.maximum(tl.minimum(last, my_end) - tl.maximum(first, my_start), 0)
    tl.store(sends + expert * ranks + who, sent, mask=inside)
    tl.store(receives + who * experts + expert, got, mask=inside)
