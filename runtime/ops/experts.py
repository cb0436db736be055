"""Operators that bring experts to ranks and their gradients back.

| operator | shapes | backward |
|---|---|---|
| ``gather_experts`` | ``[E_r,...] -> [E,...]``: the specification, and the fallback | ``reduce_scatter_experts`` |
| ``reduce_scatter_experts`` | ``[E,...] -> [E_r,...]``, the mean over ranks | none |
| ``place`` | ``-> [E,W], [K]``, this step's placement, and which experts this rank has replicas of | integers only |
| ``sparse_all_gather`` | ``[E_r,...], [E,W], [K] -> [K,...]``, all tensors of a layer | none, see ``hold`` |
| ``sparse_reduce_scatter`` | ``[E_r,...], [K,...], [E,W] -> [E_r,...]``, sum over holders, divided by W | none |
| ``top_up`` | ``[E_r,...], [K,...], [K'] -> [K',...]``, what ``calibrate`` added | none, see ``hold`` |
| ``hold`` | ``[E_r,...], [K,...] -> [E_r,...], [K,...]``, views | ``sparse_reduce_scatter`` |

A rank's own experts are never copied: products take them and the replicas as two operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.ops import sparse_collectives
from hecate.runtime.ops.registration import define, define_collective, differentiate, name_results
from hecate.runtime.state.layer import get_layer

# --- dense materialization: the specification, and the fallback for code that no pass understands ---


def _gather_experts(shard: Tensor, num_experts: int, layer: int) -> Job:
    record = get_layer(layer)
    world, owners = record.world, record.owners
    own = shard.clone(memory_format=torch.contiguous_format)
    full = own.new_empty((num_experts, *own.shape[1:]))
    return record.job("gather_experts", lambda: collectives.gather_shards(own, owners, world, out=full))


def _reduce_scatter_experts(grad: Tensor, owned: int, layer: int) -> Job:
    record = get_layer(layer)
    world, owners = record.world, record.owners
    own = grad.clone(memory_format=torch.contiguous_format)
    mean = own.new_empty((owned, *own.shape[1:]))

    def run() -> Tensor:
        return torch.div(collectives.reduce_scatter_shards(own, owners, world), world.size, out=mean)

    return record.job("reduce_scatter_experts", run)


define_collective(
    "gather_experts(Tensor shard, int num_experts, int layer) -> Tensor",
    _gather_experts,
    lambda shard, num_experts, layer: shard.new_empty((num_experts, *shard.shape[1:])),
    role="gather",
    carries="experts",
    ring_rounds=1,
    gathered_again="if rematerialized",
    results="experts",
)
define_collective(
    "reduce_scatter_experts(Tensor grad, SymInt owned, int layer) -> Tensor",
    _reduce_scatter_experts,
    lambda grad, owned, layer: grad.new_empty((owned, *grad.shape[1:])),
    role="reduce",
    carries="experts",
    results="own_grad",
)


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, ctx.layer = inputs
    ctx.owned = shard.shape[0]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hecate.reduce_scatter_experts(grad, ctx.owned, ctx.layer), None, None


differentiate("gather_experts", _gather_backward, _gather_setup)


# --- sparse materialization ---


def _place(shard: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    record = get_layer(layer)
    record.expert_bytes_sent = 0
    return record.carrier.place(record)


def placement_fake(shard: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return fake results of ``place`` for tracing; the number of replicas is an unbacked size."""
    record, replicas = get_layer(layer), torch.library.get_ctx().new_dynamic_size()
    return (
        torch.empty((record.num_experts, record.world.size), dtype=torch.int8, device="cpu"),
        torch.empty((replicas,), dtype=torch.int64, device="cpu"),
    )


def _sparse_all_gather(shards: Sequence[Tensor], placement: Tensor, replicas: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    used = record.placer.find(placement)
    travels = record.placer.travels(used)
    record.expert_bytes_sent += sparse_collectives.bytes_leaving(travels, shards)
    return record.carrier.gather_replicas(record, shards, used)


def _replicas_like(shards: Sequence[Tensor], replicas: Tensor) -> list[Tensor]:
    return [shard.new_empty((replicas.shape[0], *shard.shape[1:])) for shard in shards]


def _sparse_reduce_scatter(
    own: Sequence[Tensor], replicas: Sequence[Tensor], placement: Tensor, owned: int, layer: int
) -> Job:
    record = get_layer(layer)
    used = record.placer.find(placement)
    if used.owners != record.owners:
        raise RuntimeError(
            f"hecate: experts of {record.name} changed owners between a forward and its backward. Run the backward "
            "before the next optimizer step, or set Config(reshard_every=0)."
        )
    travels = record.placer.travels(used)
    record.expert_bytes_sent += sparse_collectives.bytes_leaving(travels, own, homeward=True)
    return record.carrier.reduce_replicas(record, own, replicas, used)


def _top_up(
    shards: Sequence[Tensor], have: Sequence[Tensor], before: Tensor, after: Tensor, replicas: Tensor, layer: int
) -> Job:
    record = get_layer(layer)
    old, new = record.placer.find(before), record.placer.find(after)
    travels = sparse_collectives.missing_travels(record.placer.travels(new), old)
    record.expert_bytes_sent += sparse_collectives.bytes_leaving(travels, shards)
    return record.job("top_up", sparse_collectives.gather(shards, travels, record.world, before=old, have=have))


define(
    "place(Tensor shard, int layer) -> (Tensor, Tensor)",
    _place,
    placement_fake,
    plans=True,
    results="placement, slots[K]",
    whole="placed",
)
define_collective(
    "sparse_all_gather(Tensor[] shards, Tensor placement, Tensor replicas, int layer) -> Tensor[]",
    _sparse_all_gather,
    lambda shards, placement, replicas, layer: _replicas_like(shards, replicas),
    role="gather",
    carries="replicas",
    saved_in_checkpoints="unless rematerialized",
    gathered_again="if rematerialized",
    results="replica",
    whole="replicas",
)
define_collective(
    "sparse_reduce_scatter(Tensor[] own, Tensor[] replicas, Tensor placement, SymInt owned, int layer) -> Tensor[]",
    _sparse_reduce_scatter,
    lambda own, replicas, placement, owned, layer: [grad.new_empty((owned, *grad.shape[1:])) for grad in own],
    role="reduce",
    carries="replicas",
    results="own_grad",
    whole="own_grads",
)
define_collective(
    "top_up(Tensor[] shards, Tensor[] have, Tensor before, Tensor after, Tensor replicas, int layer) -> Tensor[]",
    _top_up,
    lambda shards, have, before, after, replicas, layer: _replicas_like(shards, replicas),
    role="exchange",
    carries="replicas",
    saved_in_checkpoints="unless rematerialized",
    results="replica",
    whole="replicas",
)


def _no_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.lists = [len(value) if isinstance(value, (list, tuple)) else None for value in inputs]


def _no_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    # Gradients of replicas leave where the model computes with them: see :func:`hold`.
    return tuple(None if length is None else [None] * length for length in ctx.lists)


differentiate("sparse_all_gather", _no_backward, _no_setup)
differentiate("top_up", _no_backward, _no_setup)


class _Hold(torch.autograd.Function):
    """A layer's own experts and replicas; the gradients of both go to the owners together."""

    @staticmethod
    def forward(ctx: Any, layer: int, placement: Tensor, *experts: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.owned = layer, experts[0].shape[0]
        ctx.save_for_backward(placement)
        return tuple(tensor.view_as(tensor) for tensor in experts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (placement,) = ctx.saved_tensors
        half = len(grads) // 2
        own, replicas = list(grads[:half]), list(grads[half:])
        reduced = torch.ops.hecate.sparse_reduce_scatter(own, replicas, placement, ctx.owned, ctx.layer)
        return None, None, *reduced, *[None] * half


@torch.compiler.allow_in_graph
def hold(layer: int, placement: Tensor, *experts: Tensor) -> tuple[Tensor, ...]:
    """Return a rank's own experts and replicas as views whose gradients are summed over all holders and divided by W.

    Args:
        layer: its number.
        placement: who holds what, int8 ``[E, W]``.
        experts: the shards ``[E_r, ...]``, and then, of each, the replicas ``[K, ...]``.

    Source: paper, section 2 (SparseReduceScatter).
    """
    return _Hold.apply(layer, placement, *experts)


# --- reading a rank's own experts, free of charge ---


class _OwnExperts(torch.autograd.Function):
    """The shard itself; its gradient, a sum over all ranks' tokens, is averaged as DDP and FSDP do."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, world_size: int) -> Tensor:
        ctx.world_size = world_size
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad if ctx.world_size == 1 else grad / ctx.world_size), None


@torch.compiler.allow_in_graph
def own_experts(shard: Tensor, world_size: int) -> Tensor:
    """Return a view of ``shard`` ``[E_r, ...]`` whose gradient is divided by the number of ranks."""
    return _OwnExperts.apply(shard, world_size)


name_results(hold, "own, replica", whole="held")
name_results(own_experts, "own")
