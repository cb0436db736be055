"""SparseAllGather and SparseReduceScatter: experts to their replicas, and gradients back (paper, section 2).

All tensors of an expert travel together, as one row of one ``all_to_all_single`` per stage and dtype. With several
nodes there are two stages: an expert crosses to a node once and fans out inside it. Bytes that travel are the
number of replicas times the bytes of an expert: O(lambda S) of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.ops.ticket import on_device, slots_of
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Stage
from hecate.runtime.state.layer import Layer

Stages = tuple[Stage, Stage]


@dataclass(frozen=True)
class Slots:
    """This rank's slots while they are being filled.

    Attributes:
        experts: which expert is in each slot, int64 ``[S]``.
        tensors: ``[S, ...]``, one for each tensor of the layer.
    """

    experts: Ints
    tensors: list[Tensor]


def own_slots(shards: Sequence[Tensor], placement: Placement, layer: Layer) -> Slots:
    """New slots ``[S, ...]`` with copies of the rank's own experts ``[E_r, ...]``; the rest is not written yet."""
    rank = layer.world.rank
    experts = slots_of(placement, rank)
    start = int(np.searchsorted(placement.owner_array[experts], rank))
    outs = []
    for shard in shards:
        out = shard.new_empty((len(experts), *shard.shape[1:]))
        out[start : start + len(shard)] = shard
        outs.append(out)
    return Slots(experts, outs)


def gather(slots: Slots, stages: Stages, layer: Layer) -> list[Tensor]:
    """Fill the slots of replicas: SparseAllGather."""
    for stage in stages:
        _forward(slots, stage, layer)
    return slots.tensors


def take_over(slots: Slots, have: Sequence[Tensor], before: Placement, layer: Layer) -> None:
    """Copy what an earlier, smaller placement had in its slots ``have``."""
    where = _slots_holding(slots.experts, slots_of(before, layer.world.rank), before.owners.num_experts)
    there = on_device(where, slots.tensors[0].device)
    for out, tensor in zip(slots.tensors, have, strict=True):
        out.index_copy_(0, there, tensor)


def missing_stages(stages: Stages, before: Placement) -> Stages:
    """What of ``stages`` the placement ``before`` did not have.

    A rank that passes an expert on has it by then: from before, or from the first stage.
    """
    held = before.matrix > 0
    first, second = (
        Stage(experts=s.experts[new], sources=s.sources[new], destinations=s.destinations[new])
        for s in stages
        for new in (~held[s.experts, s.destinations],)
    )
    return first, second


def bytes_leaving(stages: Stages, tensors: Sequence[Tensor], rank: int, *, homeward: bool = False) -> int:
    """What a rank sends in all stages.

    Args:
        tensors: of the layer, with experts in dimension 0.
        homeward: gradients, which go the way back.
    """
    expert = sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors)
    senders = [stage.destinations if homeward else stage.sources for stage in stages]
    return expert * sum(int((ranks == rank).sum()) for ranks in senders)


def totals_of(grads: Sequence[Tensor], placement: Placement) -> list[Tensor]:
    """Copies of the slots' gradients ``[S, ...]`` to add up in: float32 for narrower dtypes, if there is to add."""
    wide = placement.num_replicas > 0
    return [
        grad.to(_sum_dtype(grad.dtype) if wide else grad.dtype, copy=True, memory_format=torch.contiguous_format)
        for grad in grads
    ]


def scatter(
    totals: list[Tensor], dtypes: Sequence[torch.dtype], placement: Placement, stages: Stages, layer: Layer
) -> list[Tensor]:
    """The mean over ranks of the slots' gradients, at the owners: ``[E_r, ...]``. SparseReduceScatter.

    A rank adds what others send to its own gradient, in rank order: first in each node, then at the owner. Sums are
    in the dtype of ``totals``, and travel in the dtype of the gradient. So one placement has one order of sums.

    Args:
        totals: from :func:`totals_of`; overwritten.
        dtypes: of the gradients.
    """
    rank, world_size = layer.world.rank, layer.world.size
    slots = slots_of(placement, rank)
    start = int(np.searchsorted(placement.owner_array[slots], rank))
    end = start + placement.owners.counts[rank]
    for stage in reversed(stages):
        _backward(totals, list(dtypes), slots, stage, layer)
    return [(total[start:end] / world_size).to(dtype) for total, dtype in zip(totals, dtypes, strict=True)]


def _slots_holding(slots: Ints, experts: Ints, num_experts: int) -> Ints:
    """The slot of each of ``experts``."""
    where = np.zeros(num_experts, dtype=np.int64)
    where[slots] = np.arange(len(slots))
    return where[experts]


@dataclass(frozen=True)
class _StageOfRank:
    """One stage seen from one rank.

    Attributes:
        leave, arrive: slots that go out and come in, ordered by the other rank, int64.
        send, receive: how many go to and come from each rank, length W.
    """

    leave: Ints
    arrive: Ints
    send: list[int]
    receive: list[int]


def _stage_of_rank(slots: Ints, stage: Stage, layer: Layer) -> _StageOfRank:
    rank, world_size = layer.world.rank, layer.world.size
    out, come = stage.sources == rank, stage.destinations == rank
    return _StageOfRank(
        leave=_slots_holding(slots, stage.experts[out], layer.num_experts),
        arrive=_slots_holding(slots, stage.experts[come], layer.num_experts),
        send=np.bincount(stage.destinations[out], minlength=world_size).tolist(),
        receive=np.bincount(stage.sources[come], minlength=world_size).tolist(),
    )


def _forward(slots: Slots, stage: Stage, layer: Layer) -> None:
    """Send experts on: from slots of this rank into slots of others."""
    if len(stage.experts) == 0:
        return
    mine = _stage_of_rank(slots.experts, stage, layer)
    for group in _by_dtype([tensor.dtype for tensor in slots.tensors]):
        tensors = [slots.tensors[index] for index in group]
        received = _exchange(tensors, mine.leave, mine.send, mine.receive, layer)
        arrive = on_device(mine.arrive, received.device)
        for tensor, part in zip(tensors, _unpack(received, tensors), strict=True):
            tensor.index_copy_(0, arrive, part)


def _backward(totals: list[Tensor], dtypes: list[torch.dtype], slots: Ints, stage: Stage, layer: Layer) -> None:
    """Return gradients the way the experts came, and add them up where they came from."""
    if len(stage.experts) == 0:
        return
    mine = _stage_of_rank(slots, stage, layer)
    # Each source adds at most once to a slot, but a slot gets several: one round for the first of each slot, one
    # for the second, and so on. Within a round no slot occurs twice, so the order of addition is that of ranks.
    rounds = _rounds(mine.leave)
    for group in _by_dtype(dtypes):
        tensors = [totals[index] for index in group]
        sent = [tensor.index_select(0, on_device(mine.arrive, tensor.device)) for tensor in tensors]
        wire = [part.to(dtypes[group[0]]) for part in sent]
        everything = np.arange(len(mine.arrive))
        received = _exchange(wire, everything, mine.receive, mine.send, layer)
        for tensor, part in zip(tensors, _unpack(received, tensors), strict=True):
            for index in rounds:
                where = on_device(index, tensor.device)
                to = on_device(mine.leave[index], tensor.device)
                tensor.index_add_(0, to, part.index_select(0, where).to(tensor.dtype))


def _rounds(slots: Ints) -> list[Ints]:
    """Split positions so that no slot occurs twice in a round; positions of a slot keep their order."""
    order = np.argsort(slots, kind="stable")
    first = np.flatnonzero(np.diff(slots[order], prepend=-1))
    lengths = np.diff(first, append=len(slots))
    turn = np.empty(len(slots), dtype=np.int64)
    turn[order] = np.arange(len(slots)) - np.repeat(first, lengths)
    return [np.flatnonzero(turn == round) for round in range(int(turn.max(initial=-1)) + 1)]


def _exchange(tensors: list[Tensor], leave: Ints, send: list[int], receive: list[int], layer: Layer) -> Tensor:
    """Move slots ``leave`` of all tensors, packed: ``[sum(receive), width]``."""
    index = on_device(leave, tensors[0].device)
    packed = torch.cat([tensor.index_select(0, index).flatten(1) for tensor in tensors], dim=1)
    return collectives.all_to_all(packed, send, receive, layer.world)


def _unpack(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    widths = [tensor.shape[1:].numel() for tensor in like]
    parts = packed.split(widths, dim=1)
    return [part.reshape(-1, *tensor.shape[1:]) for part, tensor in zip(parts, like, strict=True)]


def _by_dtype(dtypes: Sequence[torch.dtype]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        groups.setdefault(dtype, []).append(index)
    return list(groups.values())


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
