"""Dense parameters of which each rank keeps its rows: the operators that gather them and scatter their gradients.

| operator | shapes | backward |
|---|---|---|
| ``gather_dense`` | ``[c,...] -> [d,...]``, for all tensors of a call in one all-gather | ``reduce_scatter_dense`` |
| ``reduce_scatter_dense`` | ``[d,...] -> [c,...]``, the mean over ranks, in one all-to-all | none |

``d`` is the length of the parameter and ``c = ceil(d / W)``, on every rank: the last shards are padded with zeros, so
that all ranks compile the same graph. ``ids`` are those of :class:`DenseShard` records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hecate.private import foreach_copy_
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.comm.world import World
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.ops.registration import define_collective, differentiate
from hecate.runtime.state.registry import Registry


@dataclass(eq=False)
class DenseShard:
    """The record of a sharded dense parameter; see :class:`hecate.wrap.shard.Shard`.

    Rank r keeps rows ``[r * c, (r + 1) * c)``; rows from ``d`` on are padding: zeros, with gradients of zero.
    """

    id: int  # the number in the graph
    name: str  # qualified parameter name in the model; of a tied parameter, the first
    full_shape: torch.Size  # ``[d, ...]``
    sync: GradientSync
    averaged: bool = False  # the gradient that arrives next has been through ``reduce_scatter_dense``
    part: str = "rows"
    length_varies: bool = False

    @property
    def world(self) -> World:
        return self.sync.world

    @property
    def shape(self) -> torch.Size:
        """Shape of the shard, ``[c, ...]``, the same on every rank."""
        return torch.Size((-(-self.full_shape[0] // self.world.size), *self.full_shape[1:]))

    @property
    def counts(self) -> list[int]:
        """Rows of each rank without padding."""
        length, even = self.full_shape[0], self.shape[0]
        return [max(0, min(even, length - rank * even)) for rank in range(self.world.size)]

    def slice(self, full: Tensor) -> Tensor:
        """Return this rank's rows of ``full`` ``[d, ...]``, padded: a new tensor ``[c, ...]``."""
        rank = self.world.rank
        start, count = rank * self.shape[0], self.counts[rank]
        local = full.new_zeros(self.shape)
        local[:count] = full[start : start + count]
        return local

    def gather(self, local: Tensor) -> Tensor:
        """Gather the whole parameter ``[d, ...]`` from every rank's rows. A collective."""
        (full,) = torch.ops.hecate.gather_dense([local], [self.id], None)
        whole: Tensor = full
        return whole

    def take_averaged(self) -> bool:
        """Tell whether the gradient that just arrived was reduced over ranks; the next one starts anew."""
        averaged, self.averaged = self.averaged, False
        return averaged


DENSE_SHARDS: Registry[DenseShard] = Registry("dense shard")


def add_dense_shard(name: str, full_shape: torch.Size, sync: GradientSync) -> DenseShard:
    """Create a record with the next free number."""
    return DENSE_SHARDS.add(lambda id: DenseShard(id=id, name=name, full_shape=full_shape, sync=sync))


def _gather_dense(shards: Sequence[Tensor], ids: Sequence[int], dtype: torch.dtype | None) -> Job:
    """Gather whole parameters ``[d, ...]`` from all ranks' shards ``[c, ...]``, in one all-gather.

    Shards are of one dtype, on one device, and are cast to ``dtype``, if given, before they travel.
    """
    records = [DENSE_SHARDS[id] for id in ids]
    world = records[0].world
    sizes = [shard.numel() for shard in shards]
    mine = torch.cat([shard.reshape(-1) for shard in shards]).to(dtype or shards[0].dtype)
    padded = [mine.new_empty((world.size, size)) for size in sizes]

    def run() -> list[Tensor]:
        everyone = collectives.all_gather_even(mine, world)
        foreach_copy_(padded, list(everyone.split(sizes, dim=1)))
        return [
            rows.view(-1, *record.full_shape[1:])[: record.full_shape[0]]
            for rows, record in zip(padded, records, strict=True)
        ]

    return Job(world.queue, run)


def _reduce_scatter_dense(grads: Sequence[Tensor], ids: Sequence[int], dtype: torch.dtype) -> Job:
    """Bring each rank its rows ``[c, ...]`` of the mean over ranks of gradients ``[d, ...]``, in one all-to-all.

    Gradients, of one dtype, travel in ``GradientSync.dtype``, by default their own, and are added up in rank order,
    in float32 where that is wider. The result has ``dtype``.
    """
    records = [DENSE_SHARDS[id] for id in ids]
    sync, world = records[0].sync, records[0].world
    for record in records:
        record.averaged = True
    travelling = sync.dtype or grads[0].dtype
    sizes = [record.shape.numel() for record in records]
    padded = any(record.full_shape[0] % world.size for record in records)
    allocate = torch.zeros if padded else torch.empty
    send = allocate((world.size, sum(sizes)), dtype=travelling, device=grads[0].device)
    for slot, grad, record in zip(send.split(sizes, dim=1), grads, records, strict=True):
        whole, rest = divmod(grad.numel(), record.shape.numel())
        flat = grad.reshape(-1)
        slot[:whole].copy_(flat[: flat.numel() - rest].view(whole, -1))
        if rest:
            slot[whole, :rest].copy_(flat[flat.numel() - rest :])
    means = [torch.empty(record.shape, dtype=dtype, device=send.device) for record in records]

    def run() -> list[Tensor]:
        one_each = [1] * world.size
        received = collectives.all_to_all(send, one_each, one_each, world)
        total = received[0].to(torch.promote_types(travelling, torch.float32), copy=True)
        for rank in range(1, world.size):
            total += received[rank]
        flat = [mean.view(-1) for mean in means]
        foreach_copy_(flat, list(total.div_(world.size).split(sizes)))
        return means

    return Job(world.queue, run)


define_collective(
    "gather_dense(Tensor[] shards, int[] ids, ScalarType? dtype) -> Tensor[]",
    _gather_dense,
    lambda shards, ids, dtype: [
        shard.new_empty(DENSE_SHARDS[id].full_shape, dtype=dtype or shard.dtype)
        for shard, id in zip(shards, ids, strict=True)
    ],
    role="gather",
    carries="dense",
    ring_rounds=1,
    gathered_again="always",
    # A layer's dense parameters are used at the beginning of its gap, where nothing would hide them.
    gaps_ahead=2,
    results="whole",
    whole="wholes",
    records=DENSE_SHARDS,
)
define_collective(
    "reduce_scatter_dense(Tensor[] grads, int[] ids, ScalarType dtype) -> Tensor[]",
    _reduce_scatter_dense,
    lambda grads, ids, dtype: [
        grad.new_empty(DENSE_SHARDS[id].shape, dtype=dtype) for grad, id in zip(grads, ids, strict=True)
    ],
    role="reduce",
    carries="dense",
    results="shard_grad",
    whole="shard_grads",
    records=DENSE_SHARDS,
)


def _gather_dense_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shards, ids, _ = inputs
    ctx.ids, ctx.dtype = list(ids), shards[0].dtype


def _gather_dense_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return torch.ops.hecate.reduce_scatter_dense(grads, ctx.ids, ctx.dtype), None, None


differentiate("gather_dense", _gather_dense_backward, _gather_dense_setup)
