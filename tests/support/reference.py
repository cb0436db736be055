"""Plain references of the operators: what each one means, for all ranks at once, in loops.

A list argument holds one tensor per rank. Tests compare the operators with these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.topology import Topology


def gather_experts(shards: list[Tensor], owners: Owners) -> Tensor:
    """Full ``[E, ...]`` from the shards ``[E_r, ...]``; the same on every rank."""
    taken = [0] * len(shards)
    full = []
    for owner in owners.ranks:
        full.append(shards[owner][taken[owner]])
        taken[owner] += 1
    return torch.stack(full)


def reduce_scatter_experts(grads: list[Tensor], owners: Owners) -> list[Tensor]:
    """Each rank's ``[E_r, ...]``: the mean over ranks of the gradients ``[E, ...]`` of its experts."""
    mean = grads[0].clone()
    for grad in grads[1:]:
        mean = mean + grad
    mean = mean / len(grads)
    return [mean[owners.owned_by(rank)] for rank in range(len(grads))]


def slots_of(placement: Placement, rank: int) -> list[int]:
    """The experts that a rank holds: its own by number, then replicas by owner and number."""
    owners = placement.owners.ranks
    held = [expert for expert, ranks in enumerate(placement.holders) if rank in ranks]
    return sorted(held, key=lambda expert: (owners[expert] != rank, owners[expert], expert))


def replicas_of(placement: Placement, rank: int) -> list[int]:
    """The experts that a rank holds and does not own."""
    return [expert for expert in slots_of(placement, rank) if placement.owners.ranks[expert] != rank]


def sparse_all_gather(shards: list[Tensor], placement: Placement) -> list[Tensor]:
    """Each rank's replicas ``[K, ...]`` from the shards ``[E_r, ...]``: every holder has the expert."""
    full = gather_experts(shards, placement.owners)
    return [full[replicas_of(placement, rank)] for rank in range(len(shards))]


def sparse_reduce_scatter(grads: list[Tensor], placement: Placement) -> list[Tensor]:
    """Each rank's ``[E_r, ...]``: the sum over an expert's holders of its gradient, divided by W.

    Args:
        grads: of each rank's slots, ``[S, ...]``.
    """
    out = []
    for rank, grad in enumerate(grads):
        total = grad.new_zeros((placement.owners.counts[rank], *grad.shape[1:]))
        for row, expert in enumerate(placement.owners.owned_by(rank)):
            for holder in placement.holders[expert]:
                total[row] += grads[holder][slots_of(placement, holder).index(expert)]
        out.append(total / len(grads))
    return out


def top_up(shards: list[Tensor], after: Placement) -> list[Tensor]:
    """Each rank's replicas once more have come: those of the later placement."""
    return sparse_all_gather(shards, after)


def gather_counts(offsets: list[Tensor]) -> Tensor:
    """Rows of every rank for every expert, ``[W, E]``, from the ends of its experts' rows."""
    return torch.stack([torch.diff(offs.long(), prepend=offs.new_zeros(1)) for offs in offsets])


def exchange(
    rows: list[Tensor], offsets: list[Tensor], placement: Placement, sends: list[Ints]
) -> tuple[list[Tensor], list[Tensor]]:
    """Rows sorted by expert go to holders of their expert, the first ones to the lowest rank.

    Args:
        sends: of each rank, how many rows of each expert it sends to each rank, ``[E, W]``.

    Returns:
        Per rank the rows it receives, ordered by (slot, source rank, original order), and the ends of
        its slots, ``[S]``.
    """
    arrived, slot_offsets = [], []
    for rank in range(len(rows)):
        mine, ends, total = [rows[0][:0]], [], 0
        for expert in slots_of(placement, rank):
            for source, offs, quota in zip(rows, offsets, sends, strict=True):
                start = int(offs[expert - 1]) if expert else 0
                start += int(quota[expert, :rank].sum())
                mine.append(source[start : start + int(quota[expert, rank])])
                total += len(mine[-1])
            ends.append(total)
        arrived.append(torch.cat(mine))
        slot_offsets.append(torch.tensor(ends, dtype=torch.int32, device="cpu"))
    return arrived, slot_offsets


def exchange_back(
    arrived: list[Tensor], offsets: list[Tensor], placement: Placement, sends: list[Ints], num_rows: list[int]
) -> list[Tensor]:
    """The way back: every row returns to the position it left from; rows that never left are zero."""
    positions = [torch.arange(int(offs[-1]), device="cpu") for offs in offsets]
    ranks = [torch.full_like(position, rank) for rank, position in enumerate(positions)]
    where, _ = exchange(positions, offsets, placement, sends)
    whose, _ = exchange(ranks, offsets, placement, sends)
    out = [arrived[0].new_zeros((count, *arrived[0].shape[1:])) for count in num_rows]
    for rows, row_positions, row_ranks in zip(arrived, where, whose, strict=True):
        for row, position, rank in zip(rows, row_positions, row_ranks, strict=True):
            out[rank][position] = row
    return out


def relay_of(rank: int, node: int, topology: Topology) -> int:
    """The rank of ``node`` that passes on what ``rank`` sends there: the one with the same place, or itself."""
    place = topology.members[topology.node_of[rank]].index(rank)
    members = topology.members[node]
    return members[place % len(members)]


def route_nodes(
    tokens: list[Tensor], offsets: list[Tensor], placement: Placement, sends: list[Ints], topology: Topology
) -> list[list[tuple[int, int]]]:
    """Of each rank, for every row that arrives: the sender, and the row there that stands for it.

    That is the first row of the same token that goes to the same node; first in the order of what is sent: by
    destination, slot and place.
    """
    positions = [torch.arange(int(offs[-1]), device="cpu") for offs in offsets]
    where, _ = exchange(positions, offsets, placement, sends)
    whose, _ = exchange([torch.full_like(p, rank) for rank, p in enumerate(positions)], offsets, placement, sends)
    arrivals = [list(zip(whose[rank].tolist(), where[rank].tolist(), strict=True)) for rank in range(len(tokens))]
    first: dict[tuple[int, int, int], int] = {}
    for rank, rows in enumerate(arrivals):
        for source, row in rows:
            first.setdefault((source, topology.node_of[rank], int(tokens[source][row])), row)
    return [
        [(source, first[source, topology.node_of[rank], int(tokens[source][row])]) for source, row in rows]
        for rank, rows in enumerate(arrivals)
    ]


def exchange_nodes(rows: list[Tensor], routes: list[list[tuple[int, int]]]) -> list[Tensor]:
    """Of each rank the rows that arrive, each the one that stands for it.

    Args:
        routes: from :func:`route_nodes`.
    """
    width = rows[0].shape[1:]
    return [
        torch.stack([rows[source][row] for source, row in route]) if route else rows[0].new_empty((0, *width))
        for route in routes
    ]


def exchange_nodes_back(
    arrived: list[Tensor], routes: list[list[tuple[int, int]]], num_rows: list[int]
) -> list[Tensor]:
    """The way back: rows are added up where one stood for them; all other rows are zero."""
    out = [arrived[0].new_zeros((count, *arrived[0].shape[1:])) for count in num_rows]
    for rows, route in zip(arrived, routes, strict=True):
        for row, (source, position) in zip(rows, route, strict=True):
            out[source][position] += row
    return out


def gather_dense(shards: list[Tensor], full_shape: torch.Size) -> Tensor:
    """The whole parameter ``[d, ...]`` from every rank's rows ``[c, ...]``, without the padding at the end."""
    return torch.cat(shards)[: full_shape[0]]


def reduce_scatter_dense(grads: list[Tensor], rows: int) -> list[Tensor]:
    """Each rank's ``rows`` rows of the mean over ranks of gradients ``[d, ...]``; zeros beyond the last."""
    mean = torch.stack(grads).sum(0) / len(grads)
    padded = torch.cat([mean, mean.new_zeros(rows * len(grads) - len(mean), *mean.shape[1:])])
    return list(padded.split(rows))


def average_gradients(grads: list[list[Tensor]]) -> list[Tensor]:
    """The mean over ranks of each gradient in a bucket; the same on every rank."""
    return [torch.stack(of_ranks).sum(0) / len(grads) for of_ranks in zip(*grads, strict=True)]


def average_fractions(counts: list[Tensor]) -> Tensor:
    """The mean over ranks of counts ``[n]``; the same on every rank."""
    return torch.stack(counts).sum(0) / len(counts)


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Row r of ``[R, K]`` times the matrix ``[K, N]`` of the slot it lies in; rows beyond the last are zero."""
    slots = row_slots(offs, len(x))
    rows = [x[row] @ w[slots[row]] if row < int(offs[-1]) else x.new_zeros(w.shape[2]) for row in range(len(x))]
    return torch.stack(rows) if rows else x.new_zeros((0, w.shape[2]))


def grouped_mm_pair(x: Tensor, own: Tensor, replicas: Tensor, offs: Tensor) -> Tensor:
    """:func:`grouped_mm` with own experts in the first slots, and replicas in those behind."""
    return grouped_mm(x, torch.cat([own, replicas]), offs)


def row_slots(offs: Tensor, num_rows: int) -> Tensor:
    """The slot of each row, int64 ``[num_rows]``; the number of slots for rows behind the last."""
    slots = [sum(1 for end in offs.tolist() if end <= row) for row in range(num_rows)]
    return torch.tensor(slots, dtype=torch.int64, device="cpu")


def s2_mask(heads: int, length: int, pattern: Pattern) -> Tensor:
    """Which key ``[..., k]`` each query ``[.., q, :]`` of each head sees: bool ``[heads, length, length]``."""
    mask = torch.zeros((heads, length, length), dtype=torch.bool, device="cpu")
    for head in range(heads):
        number = head // (heads // pattern.patterns)
        for q in range(length):
            for k in range(q + 1):
                mask[head, q, k] = pattern.attends(number, q // pattern.block, k // pattern.block)
    return mask


def s2_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> Tensor:
    """``softmax(q k^T scale) v`` with that mask, in float64: ``[b, Hq, S, Dv]``."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    mask = s2_mask(q.shape[1], q.shape[2], pattern)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def s2_stored(x: Tensor, head: int, pattern: Pattern) -> Tensor:
    """What a cache keeps of one head of ``x``, ``[b, H, S, D]``, strided blocks first: ``[b, kept, D]``."""
    tokens, block = x.shape[2], pattern.block
    first, residue = pattern.first_local(tokens), pattern.residues(x.shape[1])[head]
    strided = [x[:, head, j * block : (j + 1) * block] for j in range(first) if j % pattern.stride == residue]
    return torch.cat([*strided, x[:, head, first * block :]], 1)
