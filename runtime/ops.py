"""The operators that passes put into graphs, each with a fake, an autograd formula and a flop count.

The plain references that define them are in ``hecate.runtime.reference``.

| operator | shapes | backward |
|---|---|---|
| ``gather_experts`` | ``[E_r,...] -> [E,...]`` | ``reduce_scatter_experts`` |
| ``place`` | ``-> [E,W], [S]``, this step's placement, and the experts in this rank's slots | none, integers only |
| ``sparse_all_gather`` | ``[E_r,...], [E,W], [S] -> [S,...]``, all tensors of a layer | ``sparse_reduce_scatter`` |
| ``gather_counts`` | ``[E] -> [W,E]``, rows of every rank for every expert; after ``place`` | none |
| ``calibrate`` | ``[W,E], [E,W] -> [E,W], [S']``, the placement after the gate | none |
| ``top_up`` | ``[E_r,...], [S,...], [S'] -> [S',...]``, what ``calibrate`` added | ``sparse_reduce_scatter`` |
| ``route`` | ``[W,E], [E,W] -> [S], [2,W], [n], [R']`` | none |
| ``count_rows`` | ``[E] -> [E]``, a copy; what ``route`` is at one rank | none |
| ``exchange`` | ``[R,...] -> [R',...]`` | ``exchange_back`` with the same ticket |
| ``exchange_back`` | ``[R',...] -> [R,...]`` | ``exchange`` with the same ticket |
| ``grouped_mm`` | ``[R,K], [S,K,N], [S] -> [R,N]`` | ``grouped_mm`` and ``grouped_mm_weight_grad`` |

R', S and n are unbacked sizes: they change with routing and placement and never cause a recompile. So is E_r, the
length of a shard, at more than one rank: owners may move without a recompile. A placement is data, int8 on the CPU
(2 owner, 1 replica), that flows from ``place`` to whatever uses it, so a backward always uses its forward's.

Those that communicate can be split into a start and a wait; see ``hecate.runtime.define``.

``layer`` is the id of a ``hecate.runtime.layer.Layer``. Operators return fresh tensors, never views
of their inputs; what is free at one rank (``own_experts``) is a plain autograd function instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hecate.runtime import sparse_collectives, transport
from hecate.runtime.define import define, define_collective
from hecate.runtime.layer import Layer, get_layer
from hecate.runtime.planner import Placement
from hecate.runtime.queue import Job
from hecate.runtime.routing import make_ticket, slots_of

_lib = torch.library.Library("hecate", "FRAGMENT")


# --- dense materialization: the specification, and the fallback for what no pass understands ---


def _gather_experts(shard: Tensor, num_experts: int, layer: int) -> Job:
    world, owners = get_layer(layer).world, get_layer(layer).owners
    own = shard.clone(memory_format=torch.contiguous_format)
    return Job(world.queue, lambda: transport.gather_shards(own, owners, world))


def _gather_experts_fake(shard: Tensor, num_experts: int, layer: int) -> Tensor:
    return shard.new_empty((num_experts, *shard.shape[1:]))


def _reduce_scatter_experts(grad: Tensor, owned: int, layer: int) -> Job:
    world, owners = get_layer(layer).world, get_layer(layer).owners
    own = grad.clone(memory_format=torch.contiguous_format)
    return Job(world.queue, lambda: transport.reduce_scatter_shards(own, owners, world).div_(world.size))


def _reduce_scatter_experts_fake(grad: Tensor, owned: int, layer: int) -> Tensor:
    return grad.new_empty((owned, *grad.shape[1:]))


define_collective(
    "gather_experts(Tensor shard, int num_experts, int layer) -> Tensor",
    _gather_experts,
    _gather_experts_fake,
    role="gather",
)
define_collective(
    "reduce_scatter_experts(Tensor grad, SymInt owned, int layer) -> Tensor",
    _reduce_scatter_experts,
    _reduce_scatter_experts_fake,
    role="reduce",
)


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, ctx.layer = inputs
    ctx.owned = shard.shape[0]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hecate.reduce_scatter_experts(grad, ctx.owned, ctx.layer), None, None


torch.library.register_autograd("hecate::gather_experts", _gather_backward, setup_context=_gather_setup, lib=_lib)


# --- sparse materialization ---


def _place(shard: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    record = get_layer(layer)
    record.expert_bytes_sent = 0
    placement = record.placer.take(record)
    record.replicas = placement.num_replicas
    return _as_tensors(placement, record)


def _as_tensors(placement: Placement, record: Layer) -> tuple[Tensor, Tensor]:
    slots = slots_of(placement, record.world.rank)
    return torch.from_numpy(placement.matrix.copy()), torch.from_numpy(slots)


def _placement_fake(shard: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    record, slots = get_layer(layer), torch.library.get_ctx().new_dynamic_size()
    return (
        torch.empty((record.num_experts, record.world.size), dtype=torch.int8, device="cpu"),
        torch.empty((slots,), dtype=torch.int64, device="cpu"),
    )


def _sparse_all_gather(shards: Sequence[Tensor], placement: Tensor, slots: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    used = record.placer.find(record, placement)
    stages = record.placer.transfers(record, used)
    slots_of_rank = sparse_collectives.own_slots(shards, used, record)
    return Job(record.world.queue, lambda: sparse_collectives.gather(slots_of_rank, stages, record))


def _sparse_all_gather_fake(shards: Sequence[Tensor], placement: Tensor, slots: Tensor, layer: int) -> list[Tensor]:
    return [shard.new_empty((slots.shape[0], *shard.shape[1:])) for shard in shards]


def _sparse_reduce_scatter(grads: Sequence[Tensor], placement: Tensor, owned: int, layer: int) -> Job:
    record = get_layer(layer)
    used = record.placer.find(record, placement)
    if used.owners != record.owners:
        raise RuntimeError(
            f"hecate: experts of {record.name} changed owners between a forward and its backward. Run the backward "
            "before the next optimizer step, or set Config(reshard_every=0)."
        )
    stages = record.placer.transfers(record, used)
    totals = sparse_collectives.totals_of(grads, used)
    dtypes = [grad.dtype for grad in grads]
    return Job(record.world.queue, lambda: sparse_collectives.scatter(totals, dtypes, used, stages, record))


def _sparse_reduce_scatter_fake(grads: Sequence[Tensor], placement: Tensor, owned: int, layer: int) -> list[Tensor]:
    return [grad.new_empty((owned, *grad.shape[1:])) for grad in grads]


def _top_up(
    shards: Sequence[Tensor], have: Sequence[Tensor], before: Tensor, after: Tensor, slots: Tensor, layer: int
) -> Job:
    record = get_layer(layer)
    old, new = record.placer.find(record, before), record.placer.find(record, after)
    stages = record.placer.transfers(record, new)
    slots_of_rank = sparse_collectives.own_slots(shards, new, record)
    sparse_collectives.take_over(slots_of_rank, have, old, record)
    return Job(record.world.queue, lambda: sparse_collectives.top_up(slots_of_rank, old, stages, record))


def _top_up_fake(
    shards: Sequence[Tensor], have: Sequence[Tensor], before: Tensor, after: Tensor, slots: Tensor, layer: int
) -> list[Tensor]:
    return _sparse_all_gather_fake(shards, after, slots, layer)


define("place(Tensor shard, int layer) -> (Tensor, Tensor)", _place, _placement_fake)
define_collective(
    "sparse_all_gather(Tensor[] shards, Tensor placement, Tensor slots, int layer) -> Tensor[]",
    _sparse_all_gather,
    _sparse_all_gather_fake,
    role="gather",
)
define_collective(
    "sparse_reduce_scatter(Tensor[] grads, Tensor placement, SymInt owned, int layer) -> Tensor[]",
    _sparse_reduce_scatter,
    _sparse_reduce_scatter_fake,
    role="reduce",
)
define_collective(
    "top_up(Tensor[] shards, Tensor[] have, Tensor before, Tensor after, Tensor slots, int layer) -> Tensor[]",
    _top_up,
    _top_up_fake,
    role="exchange",
)


def _sparse_all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shards, placement, _, ctx.layer = inputs
    ctx.owned = shards[0].shape[0]
    ctx.save_for_backward(placement)


def _sparse_all_gather_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (placement,) = ctx.saved_tensors
    return torch.ops.hecate.sparse_reduce_scatter(grads, placement, ctx.owned, ctx.layer), None, None, None


def _top_up_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    shards, have, _, placement, _, ctx.layer = inputs
    ctx.owned, ctx.ready = shards[0].shape[0], len(have)
    ctx.save_for_backward(placement)


def _top_up_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    # All gradients go to the owners from here; the slots that were ready are copies of the same experts.
    (placement,) = ctx.saved_tensors
    owned = torch.ops.hecate.sparse_reduce_scatter(grads, placement, ctx.owned, ctx.layer)
    return owned, [None] * ctx.ready, None, None, None, None


torch.library.register_autograd(
    "hecate::sparse_all_gather", _sparse_all_gather_backward, setup_context=_sparse_all_gather_setup, lib=_lib
)
torch.library.register_autograd("hecate::top_up", _top_up_backward, setup_context=_top_up_setup, lib=_lib)


# --- token exchange ---


def _gather_counts(offsets: Tensor, placement: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    world, placer = record.world, record.placer
    counts = torch.diff(offsets.to(torch.int64), prepend=offsets.new_zeros(1, dtype=torch.int64))
    signed = torch.cat([counts, counts.new_full((1,), placer.signature)])

    def run() -> Tensor:
        return transport.all_gather_even(signed.to(world.control_device), world)

    def finish(gathered: Tensor) -> Tensor:
        # Here and not above: it waits for the device, which must not keep what comes next from being started.
        gathered = gathered.cpu()
        placer.check(gathered[:, -1])
        record.counts = gathered[:, :-1].contiguous()
        record.bytes_sent = 0
        placer.observe(record, record.counts.numpy())
        return record.counts.clone()

    return Job(world.queue, run, finish=finish)


def _gather_counts_fake(offsets: Tensor, placement: Tensor, layer: int) -> Tensor:
    record = get_layer(layer)
    return torch.empty((record.world.size, record.num_experts), dtype=torch.int64, device="cpu")


def _calibrate(counts: Tensor, placement: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    record = get_layer(layer)
    calibrated = record.placer.calibrate(record, record.placer.find(record, placement), counts.numpy())
    record.replicas = calibrated.num_replicas
    return _as_tensors(calibrated, record)


def _calibrate_fake(counts: Tensor, placement: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return _placement_fake(counts, layer)


def _route(
    counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    record = get_layer(layer)
    used = record.placer.find(record, placement)
    quotas = record.placer.assign(record, used, counts.numpy())
    ticket = make_ticket(quotas, used, record.world.rank, offsets.device)
    record.rows = int(ticket.splits[1].sum())
    return ticket.slot_offsets, ticket.splits, ticket.send_index, ticket.receive_index


def _route_fake(
    counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ctx = torch.library.get_ctx()
    world_size = get_layer(layer).world.size
    return (
        offsets.new_empty((slots,), dtype=torch.int32),
        torch.empty((2, world_size), dtype=torch.int64, device="cpu"),
        offsets.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        offsets.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
    )


def _count_rows(offsets: Tensor, layer: int) -> Tensor:
    # Stays on the device: one rank needs no counts on the host, and reading them would wait for the device.
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    get_layer(layer).counts = counts.unsqueeze(0)
    return offsets.clone()


def _count_rows_fake(offsets: Tensor, layer: int) -> Tensor:
    return torch.empty_like(offsets)


def _exchange(rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    send, receive = splits.tolist()
    record.bytes_sent += _bytes_to_others(rows, send, record.world.rank)
    record.row_bytes = rows.shape[1:].numel() * rows.element_size()
    leaving, order = rows.index_select(0, send_index), receive_index.clone()

    def run() -> Tensor:
        return transport.all_to_all(leaving, send, receive, record.world).index_select(0, order)

    return Job(record.world.queue, run)


def _exchange_fake(rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, layer: int) -> Tensor:
    return rows.new_empty((receive_index.shape[0], *rows.shape[1:]))


def _exchange_back(
    rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, num_rows: int, layer: int
) -> Job:
    record = get_layer(layer)
    receive, send = splits.tolist()
    record.bytes_sent += _bytes_to_others(rows, send, record.world.rank)
    by_source = torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, receive_index, rows)
    order = send_index.clone()

    def run() -> Tensor:
        returned = transport.all_to_all(by_source, send, receive, record.world)
        # Rows beyond the last offset were never sent (padding, dropped tokens): they are zero, not garbage.
        complete = returned.shape[0] == num_rows
        out = torch.empty_like(returned) if complete else returned.new_zeros((num_rows, *returned.shape[1:]))
        return out.index_copy_(0, order, returned)

    return Job(record.world.queue, run, meanwhile=lambda: record.placer.plan_ahead(record))


def _exchange_back_fake(
    rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, num_rows: int, layer: int
) -> Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


def _bytes_to_others(rows: Tensor, send: list[int], rank: int) -> int:
    row_bytes = rows.element_size() * rows[0:1].numel() if rows.shape[0] else 0
    return (sum(send) - send[rank]) * row_bytes


define_collective(
    "gather_counts(Tensor offsets, Tensor placement, int layer) -> Tensor",
    _gather_counts,
    _gather_counts_fake,
    role="exchange",
)
define("calibrate(Tensor counts, Tensor placement, int layer) -> (Tensor, Tensor)", _calibrate, _calibrate_fake)
define(
    "route(Tensor counts, Tensor placement, Tensor offsets, SymInt slots, int layer) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _route,
    _route_fake,
)
define("count_rows(Tensor offsets, int layer) -> Tensor", _count_rows, _count_rows_fake)
define_collective(
    "exchange(Tensor rows, Tensor splits, Tensor send_index, Tensor receive_index, int layer) -> Tensor",
    _exchange,
    _exchange_fake,
    role="exchange",
)
define_collective(
    "exchange_back(Tensor rows, Tensor splits, Tensor send_index, Tensor receive_index, "
    "SymInt num_rows, int layer) -> Tensor",
    _exchange_back,
    _exchange_back_fake,
    role="exchange",
)


def _exchange_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, splits, send_index, receive_index, ctx.layer = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(splits, send_index, receive_index)


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.hecate.exchange_back(grad, *ctx.saved_tensors, ctx.num_rows, ctx.layer)
    return back, None, None, None, None


def _exchange_back_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, splits, send_index, receive_index, _, ctx.layer = inputs
    ctx.save_for_backward(splits, send_index, receive_index)


def _exchange_back_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hecate.exchange(grad, *ctx.saved_tensors, ctx.layer), None, None, None, None, None


torch.library.register_autograd("hecate::exchange", _exchange_backward, setup_context=_exchange_setup, lib=_lib)
torch.library.register_autograd(
    "hecate::exchange_back", _exchange_back_backward, setup_context=_exchange_back_setup, lib=_lib
)


# --- compute on slots ---


def _native_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> bool:
    """Whether torch's own kernel takes these operands: bf16 on CUDA with 16-byte aligned rows."""
    return (
        x.is_cuda
        and x.dtype == w.dtype == torch.bfloat16
        and x.shape[0] > 0
        and w.shape[0] > 0
        and all(size * x.element_size() % 16 == 0 for size in w.shape[1:])
    )


def _grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    if _native_grouped_mm(x, w, offs):
        out = torch._grouped_mm(x.contiguous(), w, offs=offs.to(torch.int32))
        # The kernel leaves rows beyond the last offset unwritten.
        return out.masked_fill_(_padding(offs, x.shape[0]), 0)
    out = x.new_empty((x.shape[0], w.shape[2]))
    start = 0
    for slot, end in enumerate(offs.tolist()):
        if start < end:
            torch.mm(x[start:end], w[slot], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


def _padding(offs: Tensor, num_rows: int) -> Tensor:
    return (torch.arange(num_rows, device=offs.device) >= offs[-1]).unsqueeze(1)


def _grouped_mm_fake(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    torch._check(x.dim() == 2 and w.dim() == 3, lambda: f"grouped_mm: {x.shape} @ {w.shape}")
    torch._check(x.shape[1] == w.shape[1], lambda: f"grouped_mm: {x.shape} @ {w.shape}")
    return x.new_empty((x.shape[0], w.shape[2]))


def _grouped_mm_weight_grad(x: Tensor, grad: Tensor, offs: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return _grouped_mm_weight_grad(grad, x, offs, False).transpose(1, 2)
    slots, k, n = offs.shape[0], x.shape[1], grad.shape[1]
    out = x.new_empty((slots, k, n))
    start = 0
    for slot, end in enumerate(offs.tolist()):
        if start < end:
            torch.mm(x[start:end].t(), grad[start:end], out=out[slot])
        else:
            out[slot].zero_()
        start = end
    return out


def _grouped_mm_weight_grad_fake(x: Tensor, grad: Tensor, offs: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return x.new_empty((offs.shape[0], grad.shape[1], x.shape[1])).transpose(1, 2)
    return x.new_empty((offs.shape[0], x.shape[1], grad.shape[1]))


def _row_slots(offs: Tensor, num_rows: int) -> Tensor:
    slots = torch.arange(offs.shape[0], device=offs.device)
    lengths = torch.diff(offs.to(torch.int64), prepend=offs.new_zeros(1, dtype=torch.int64))
    inside = torch.repeat_interleave(slots, lengths)
    # Padding rows belong to no slot; the last one is as good as any, since they are never read.
    return torch.nn.functional.pad(inside, (0, num_rows - inside.shape[0]), value=max(offs.shape[0] - 1, 0))


def _row_slots_fake(offs: Tensor, num_rows: int) -> Tensor:
    return offs.new_empty((num_rows,), dtype=torch.int64)


def _sizes_to_offsets(sizes: list[int], like: Tensor) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(like.device)


def _sizes_to_offsets_fake(sizes: list[int], like: Tensor) -> Tensor:
    return like.new_empty((len(sizes),), dtype=torch.int32)


define("grouped_mm(Tensor x, Tensor w, Tensor offs) -> Tensor", _grouped_mm, _grouped_mm_fake)
define(
    "grouped_mm_weight_grad(Tensor x, Tensor grad, Tensor offs, bool transposed) -> Tensor",
    _grouped_mm_weight_grad,
    _grouped_mm_weight_grad_fake,
)
define("row_slots(Tensor offs, SymInt num_rows) -> Tensor", _row_slots, _row_slots_fake)
define("sizes_to_offsets(SymInt[] sizes, Tensor like) -> Tensor", _sizes_to_offsets, _sizes_to_offsets_fake)


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offs = inputs
    # The gradient takes the weight's own memory layout, so that a transposed weight costs no copy.
    ctx.transposed = w.stride(1) == 1 and w.stride(2) != 1
    ctx.save_for_backward(x, w, offs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offs = ctx.saved_tensors
    grad_x = grad_w = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hecate.grouped_mm(grad, w.transpose(1, 2), offs)
    if ctx.needs_input_grad[1]:
        grad_w = torch.ops.hecate.grouped_mm_weight_grad(x, grad, offs, ctx.transposed)
    return grad_x, grad_w, None


torch.library.register_autograd("hecate::grouped_mm", _grouped_mm_backward, setup_context=_grouped_mm_setup, lib=_lib)


@register_flop_formula(torch.ops.hecate.grouped_mm)
def _grouped_mm_flops(x_shape: Any, w_shape: Any, offs_shape: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two operations per multiply-add, all rows counted: ``2 R K N``."""
    return 2 * x_shape[0] * w_shape[1] * w_shape[2]


@register_flop_formula(torch.ops.hecate.grouped_mm_weight_grad)
def _grouped_mm_weight_grad_flops(x_shape: Any, grad_shape: Any, offs_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * grad_shape[1]


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
    """A view of ``shard`` ``[E_r, ...]`` whose gradient is divided by the number of ranks."""
    return _OwnExperts.apply(shard, world_size)
