"""Collectives on tensors whose first dimension is split unevenly over ranks.

With gloo these are messages, summed in rank order so that results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hecate.runtime.comm.history import current_label, history_of, labelled
from hecate.runtime.comm.messages import FEW, Awaited, Few, carries, exchange
from hecate.runtime.comm.supervise import supervised
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.topology import Topology

# Up to so many bytes, gathering all tensors and adding up is faster than scattering shares and gathering their sums.
_STRAIGHT_BYTES = 2**14
_JOINED: dict[dist.ReduceOp.RedOpType, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(0, dtype=parts.dtype),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
    dist.ReduceOp.MIN: lambda parts: parts.amin(0),
}
# Tensors that a CUDA graph being captured will copy from the host; whoever captures it keeps them.
_constants: list[torch.Tensor] | None = None
# A gap behind a part of odd length lets the next begin at 16 bytes: else Triton compiles another kernel.
_GAPS = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def proof(world: World) -> list[int]:
    """Return two numbers about all collectives so far; see :func:`hecate.runtime.comm.history.proven`."""
    return history_of(world.group).proof if world.group is not None else [0, 0]


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor that is split along another mesh (a DTensor); of others, the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slices_of(full: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
    """Return a copy of the rows ``experts`` of a full ``[E, ...]`` tensor, with storage of its own."""
    if len(experts) and list(experts) == list(range(experts[0], experts[-1] + 1)):
        return full[experts[0] : experts[-1] + 1].clone()
    return full[list(experts)].clone()


def on_device(numbers: np.ndarray, device: torch.device, *, constant: bool = False) -> torch.Tensor:
    """Return numbers of the host as a tensor on ``device``, without waiting for what the device does meanwhile.

    While a CUDA graph is captured only ``constant`` numbers, which follow from shapes alone, may be copied: replays
    copy them again. Others raise RuntimeError.
    """
    tensor = torch.from_numpy(numbers)
    if device.type == "cpu":
        return tensor
    pinned = tensor.pin_memory()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if not constant or _constants is None:
            raise RuntimeError(
                "hecate: a CUDA graph is being captured, and needs numbers that the host finds anew in each step. "
                "Use hecate.capture, for a model that exchanges all its rows"
            )
        _constants.append(pinned)
    return pinned.to(device, non_blocking=True)


def on_device_together(numbers: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Bring several int64 arrays to ``device`` with one copy, as :func:`on_device`; the results are parts of it."""
    if device.type == "cpu":
        # Nothing is copied here, so nothing need be put together.
        return [torch.from_numpy(part) for part in numbers]
    return parts_of(on_device(joined(numbers), device), numbers)


def joined(numbers: Sequence[np.ndarray]) -> np.ndarray:
    """Join several int64 arrays to one, int64 ``[n]``."""
    return np.concatenate([piece for part in numbers for piece in (part.reshape(-1), _GAPS[part.size % 2])])


def parts_of(together: torch.Tensor, numbers: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return views of the arrays that :func:`joined` put together from ``numbers``."""
    pieces = together.split([length for part in numbers for length in (part.size, part.size % 2)])
    return [piece.view(part.shape) for piece, part in zip(pieces[::2], numbers, strict=True)]


@contextmanager
def keeping_constants() -> Iterator[list[torch.Tensor]]:
    """Collect the tensors that CUDA graphs captured in the block copy from the host, to be kept as long as these."""
    global _constants
    kept: list[torch.Tensor] = []
    _constants = kept
    try:
        yield kept
    finally:
        _constants = None


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host's memory; from a GPU it is there when the stream has come so far: ``Job.on_host``."""
    if not tensor.is_cuda:
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], world: World) -> torch.Tensor:
    """Send ``send[w]`` consecutive rows to each rank w: ``[sum(send), ...] -> [sum(receive), ...]`` in rank order."""
    if world.through_host and rows.device.type != "cpu":
        return all_to_all(rows.cpu(), send, receive, world).to(rows.device)
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    if world.group is None:
        return out.copy_(rows)
    group, rows = world.group, rows.contiguous()

    def start(tag: int) -> Awaited | None:
        if carries(group, rows.device):
            return exchange(out.split(receive), rows.split(send), group, tag)
        dist.all_to_all_single(out, rows, receive, send, group=group)
        return None

    supervised("all_to_all", start, rows, group, (send, receive))
    return out


def all_gather_even(tensor: torch.Tensor, world: World, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Stack equally shaped tensors of all ranks: ``[...] -> [W, ...]``, a view of ``out`` (contiguous) if given."""
    # Flat, because gloo takes stacked output only for one-dimensional input.
    out = tensor.new_empty(world.size * tensor.numel()) if out is None else out.view(-1)
    if world.group is None:
        return out.copy_(tensor.reshape(-1)).view(1, *tensor.shape)
    if world.through_host and tensor.device.type != "cpu":
        return out.copy_(all_gather_even(tensor.cpu(), world).view(-1)).view(world.size, *tensor.shape)
    group, flat = world.group, tensor.reshape(-1)

    def start(tag: int) -> Awaited | None:
        if carries(group, flat.device):
            if 0 < flat.nbytes <= FEW:
                return Few(flat, out, group, tag)
            # ``split`` would give a single part where there are no values.
            return exchange(list(out.view(world.size, flat.numel())), [flat] * world.size, group, tag)
        _all_gather(out, flat, group=group)
        return None

    supervised("all_gather", start, flat, group)
    return out.view(world.size, *tensor.shape)


def gather_shards(
    shard: torch.Tensor, owners: Owners, world: World, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Gather all experts on every rank, in expert order: ``[E_r, ...] -> [E, ...]``, into ``out`` if it is given.

    Unequal shards are padded to the largest one, because gloo and NCCL gather equal sizes only.
    """
    if out is None:
        out = shard.new_empty((len(owners.ranks), *shard.shape[1:]))
    if world.group is None:
        return out.copy_(shard)
    counts, most = owners.counts, max(owners.counts)
    even = min(counts) == most
    if not even and shard.shape[0] < most:
        padding = shard.new_zeros((most - shard.shape[0], *shard.shape[1:]))
        shard = torch.cat([shard, padding])
    if even and owners.in_order:
        all_gather_even(shard, world, out=out)
        return out
    stacked = all_gather_even(shard, world)
    joined = torch.cat([stacked[rank, :count] for rank, count in enumerate(counts)])
    if owners.in_order:
        return out.copy_(joined)
    out[_by_rank(owners, out.device)] = joined
    return out


def _by_rank(owners: Owners, device: torch.device) -> torch.Tensor:
    return on_device(owners.by_rank, device)


def reduce_scatter_shards(full: torch.Tensor, owners: Owners, world: World) -> torch.Tensor:
    """Return the sum over ranks of own experts, in rank order and at least float32: ``[E, ...] -> [E_r, ...]``."""
    if world.group is None:
        return full.clone()
    mine = owners.counts[world.rank]
    ordered = full if owners.in_order else full[_by_rank(owners, full.device)]
    received = all_to_all(ordered, owners.counts, [mine] * world.size, world)
    parts = received.view(world.size, mine, *full.shape[1:])
    total = parts[0].to(torch.promote_types(full.dtype, torch.float32), copy=True)
    for rank in range(1, world.size):
        total += parts[rank]
    return total.to(full.dtype)


def scatter_shards(full: torch.Tensor | None, like: torch.Tensor, owners: Owners, world: World) -> None:
    """Send to every rank its experts of rank 0's ``full`` ``[E, ...]``, into ``like`` ``[E_r, ...]``."""
    if full is not None and not owners.in_order:
        full = full[_by_rank(owners, full.device)]
    scatter_rows(full, like, owners.counts, world)


def scatter_rows(full: torch.Tensor | None, like: torch.Tensor, counts: list[int], world: World) -> None:
    """Send to each rank w the next ``counts[w]`` rows of rank 0's ``full``, into ``like``."""
    if world.group is None:
        assert full is not None
        like.copy_(full)
        return
    if world.rank == 0:
        assert full is not None
        send, rows = counts, full
    else:
        send, rows = [0] * world.size, like.new_empty((0, *like.shape[1:]))
    receive = [counts[world.rank]] + [0] * (world.size - 1)
    like.copy_(all_to_all(rows, send, receive, world))


def move_shards(shard: torch.Tensor, old: Owners, new: Owners, world: World) -> torch.Tensor:
    """Bring every expert to its new owner: ``[E_old, ...] -> [E_new, ...]``."""
    mine, next = old.owned_by(world.rank), new.owned_by(world.rank)
    leave = sorted(range(len(mine)), key=lambda slot: (new.ranks[mine[slot]], mine[slot]))
    arrive = sorted(range(len(next)), key=lambda slot: (old.ranks[next[slot]], next[slot]))
    send = [sum(new.ranks[expert] == rank for expert in mine) for rank in range(world.size)]
    receive = [sum(old.ranks[expert] == rank for expert in next) for rank in range(world.size)]
    received = all_to_all(shard[leave], send, receive, world)
    out = torch.empty_like(received)
    out[arrive] = received
    return out


def broadcast(tensor: torch.Tensor, world: World) -> None:
    """Overwrite ``tensor`` with rank 0's, in place."""
    group = world.group
    if group is None:
        return
    if not carries(group, torch.device("cpu") if world.through_host else tensor.device):
        supervised("broadcast", lambda tag: dist.broadcast(tensor, group=group, group_src=0), tensor, group)
        return
    flat = tensor.to("cpu").contiguous().view(-1)
    nothing = [flat[:0]] * world.size
    going = [flat] * world.size if world.rank == 0 else nothing
    coming = nothing if world.rank == 0 else [flat, *nothing[1:]]
    if world.rank == 0:
        going[0] = flat[:0]
    supervised("broadcast", lambda tag: exchange(coming, going, group, tag), tensor, group)
    if world.rank != 0 and flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def all_reduce(tensor: torch.Tensor, world: World, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Overwrite ``tensor`` with the sum over ranks, or their ``MAX`` or ``MIN``, in place."""
    group = world.group
    if group is None:
        return
    if not carries(group, torch.device("cpu") if world.through_host else tensor.device):
        supervised("all_reduce", lambda tag: dist.all_reduce(tensor, op=op, group=group), tensor, group)
        return
    flat, join = tensor.detach().to("cpu").reshape(-1), _JOINED[op]
    with labelled(current_label() or f"all_reduce of {flat.numel()} {str(flat.dtype).removeprefix('torch.')}"):
        if flat.nbytes <= _STRAIGHT_BYTES:
            total = join(all_gather_even(flat, world))
        else:
            everybody, shares = range(world.size), _shares(flat.numel(), world.size)
            total = _all_shares(join(_gathered(flat, everybody, shares, world)), everybody, shares, world)
    tensor.copy_(total.view(tensor.shape))


def all_reduce_by_nodes(flat: torch.Tensor, topology: Topology, world: World) -> None:
    """Overwrite ``flat`` ``[n]`` with the sum over ranks, sent over each node's link as seldom as can be.

    A ring sends nearly twice the tensor out of every node. Here ranks of a node each add up a part, ranks of the same
    place add up parts across nodes: ``2 (N - 1) / N`` times the tensor leaves each of N nodes. Sums run in rank order
    inside nodes, then in node order. With NCCL or nodes of unequal size this is :func:`all_reduce`.
    """
    sizes = set(map(len, topology.members))
    if world.group is None or topology.num_nodes == 1 or len(sizes) > 1 or flat.device.type != "cpu":
        all_reduce(flat, world)
        return
    node = topology.node_of[world.rank]
    neighbours = topology.members[node]
    place = neighbours.index(world.rank)
    across = [ranks[place] for ranks in topology.members]
    shares = _shares(flat.numel(), len(neighbours))
    part = _gathered(flat, neighbours, shares, world).sum(0)
    if len(across) == 2:
        # Two nodes exchange their parts in one step, and send no more than they would in two.
        part = _all_shares(part, across, [len(part)] * 2, world).view(2, -1).sum(0)
    else:
        parts = _shares(len(part), len(across))
        part = _all_shares(_gathered(part, across, parts, world).sum(0), across, parts, world)
    flat.copy_(_all_shares(part, neighbours, shares, world))


def _shares(length: int, among: int) -> list[int]:
    """Return ``among`` lengths that add up to ``length`` and differ by one at most."""
    return [length * (index + 1) // among - length * index // among for index in range(among)]


def _gathered(flat: torch.Tensor, ranks: Sequence[int], shares: list[int], world: World) -> torch.Tensor:
    """Gather this rank's share of each of the ``flat`` of ``ranks``, divided as ``shares`` says: ``[n, share]``."""
    mine = shares[ranks.index(world.rank)]
    received = all_to_all(flat, _to(ranks, shares, world), _to(ranks, [mine] * len(ranks), world), world)
    return received.view(len(ranks), mine)


def _all_shares(share: torch.Tensor, ranks: Sequence[int], shares: list[int], world: World) -> torch.Tensor:
    """Gather the shares of ``ranks``, one from each, one behind the other."""
    return all_to_all(
        share.repeat(len(ranks)), _to(ranks, [len(share)] * len(ranks), world), _to(ranks, shares, world), world
    )


def _to(ranks: Sequence[int], lengths: Sequence[int], world: World) -> list[int]:
    """Return ``lengths`` at the places of ``ranks``, which ascend, and 0 at all others: length W."""
    found = [0] * world.size
    for rank, length in zip(ranks, lengths, strict=True):
        found[rank] = length
    return found
