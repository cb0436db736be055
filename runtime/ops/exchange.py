"""Operators that bring rows to experts and results back.

| operator | shapes | backward |
|---|---|---|
| ``gather_counts`` | ``[E] -> [W,E]``, rows of every rank for every expert; after ``place`` | none |
| ``calibrate`` | ``[W,E], [E,W] -> [E,W], [S']``, the placement after the gate | none |
| ``route`` | ``[W,E], [E,W] -> [S], [2,W], [n], [R']``, ends of the slots, and an exchange's ticket; n times | none |
| ``route_fixed`` | ``[W,E], [E,W] -> [S], [3,W], [R], [C]``, a ticket on the device for room of C rows | none |
| ``count_rows`` | ``[E] -> [E]``, a copy; what ``route`` is at one rank | none |
| ``exchange`` | ``[R,...] -> [R',...]`` | ``exchange_back`` with the same ticket |
| ``exchange_back`` | ``[R',...] -> [R,...]`` | ``exchange`` with the same ticket |

With ``Config(transport="symmetric")`` counts stay on the device, tickets come from ``route_fixed``, R' is C, and rows
travel one-sided (``symmetric``). The operators are the same, so passes need not tell them apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.scatter_rows import scatter_rows
from hecate.runtime.ops import symmetric
from hecate.runtime.ops.device_dispatch import room_for
from hecate.runtime.ops.experts import as_tensors, placement_fake
from hecate.runtime.ops.registration import define, define_collective, differentiate
from hecate.runtime.ops.ticket import make_tickets
from hecate.runtime.state.layer import get_layer


def _gather_counts(offsets: Tensor, placement: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    world, placer = record.world, record.placer
    counts = torch.diff(offsets.to(torch.int64), prepend=offsets.new_zeros(1, dtype=torch.int64))
    if record.symmetric is not None:
        return symmetric.gather_counts(record, counts)
    plans = placer.model.signature

    def run() -> Tensor:
        # Now, and not above: what has run before this is known when it runs.
        device = world.counts_device
        signature = collectives.on_device(np.array([plans, *collectives.proof(world)], dtype=np.int64), device)
        return collectives.on_host(collectives.all_gather_even(torch.cat([counts.to(device), signature]), world))

    def finish(gathered: Tensor) -> Tensor:
        placer.model.check(gathered[:, -3:])
        record.counts = gathered[:, :-3].contiguous()
        record.bytes_sent = record.node_bytes_sent = 0
        placer.observe(record.counts.numpy())
        return record.counts.clone()

    return Job(world.queue, run, finish=finish, on_host=True, label=record.placer.label("gather_counts"))


def _gather_counts_fake(offsets: Tensor, placement: Tensor, layer: int) -> Tensor:
    record = get_layer(layer)
    device = offsets.device if record.symmetric is not None else "cpu"
    return torch.empty((record.world.size, record.num_experts), dtype=torch.int64, device=device)


def _calibrate(counts: Tensor, placement: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    record = get_layer(layer)
    calibrated = record.placer.calibrate(record.placer.find(placement), counts.numpy())
    record.replicas = calibrated.num_replicas
    return as_tensors(calibrated, record)


def _calibrate_fake(counts: Tensor, placement: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return placement_fake(counts, layer)


def _route(counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, chunks: int, layer: int) -> list[Tensor]:
    record = get_layer(layer)
    used = record.placer.find(placement)
    quotas = record.placer.assign(used, counts.numpy())
    tickets = make_tickets(quotas, used, record.world.rank, offsets.device, chunks)
    record.rows = sum(int(ticket.splits[1].sum()) for ticket in tickets)
    return [
        part for ticket in tickets
        for part in (ticket.slot_offsets, ticket.splits, ticket.send_index, ticket.receive_index)
    ]  # fmt: skip


def _route_fake(
    counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, chunks: int, layer: int
) -> list[Tensor]:
    ctx = torch.library.get_ctx()
    world_size = get_layer(layer).world.size
    found = []
    for _ in range(chunks):
        found += [
            offsets.new_empty((slots,), dtype=torch.int32),
            torch.empty((2, world_size), dtype=torch.int64, device="cpu"),
            offsets.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
            offsets.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        ]
    return found


def _route_fixed(
    counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, rows: int, percent: int, layer: int
) -> list[Tensor]:
    record = get_layer(layer)
    ticket = symmetric.route(record, counts, record.placer.find(placement), rows, percent)
    return [ticket.slot_offsets, ticket.splits, ticket.send_index, ticket.receive_index]


def _route_fixed_fake(
    counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, rows: int, percent: int, layer: int
) -> list[Tensor]:
    return [
        offsets.new_empty((slots,), dtype=torch.int32),
        counts.new_empty((3, get_layer(layer).world.size)),
        counts.new_empty((rows,)),
        counts.new_empty((room_for(rows, percent),)),
    ]


def _count_rows(offsets: Tensor, layer: int) -> Tensor:
    # Stays on the device: one rank needs no counts on the host, and reading them would wait for the device.
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    get_layer(layer).counts = counts.unsqueeze(0)
    return offsets.clone()


def _count_rows_fake(offsets: Tensor, layer: int) -> Tensor:
    return torch.empty_like(offsets)


def _exchange(rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    if record.symmetric is not None:
        return symmetric.exchange(record, rows, splits, send_index, receive_index)
    send, receive = splits.tolist()
    record.count_rows_sent(rows, send)
    leaving, order = gather_rows(rows, send_index, record.wire_of(rows)), receive_index.clone()
    arrived = rows.new_empty((order.shape[0], *rows.shape[1:]))

    def run() -> Tensor:
        return gather_rows(collectives.all_to_all(leaving, send, receive, record.world), order, out=arrived)

    planning = record.planning(homeward=False)
    return Job(record.world.queue, run, meanwhile=planning, label=record.placer.label("exchange"))


def _exchange_fake(rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, layer: int) -> Tensor:
    return rows.new_empty((receive_index.shape[0], *rows.shape[1:]))


def _exchange_back(
    rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, num_rows: int, layer: int
) -> Job:
    record = get_layer(layer)
    if record.symmetric is not None:
        return symmetric.exchange_back(record, rows, splits, send_index, receive_index, num_rows)
    receive, send = splits.tolist()
    record.count_rows_sent(rows, send)
    by_source = scatter_rows(rows, receive_index, rows.shape[0], record.wire_of(rows))
    order, home = send_index.clone(), rows.new_empty((num_rows, *rows.shape[1:]))

    def run() -> Tensor:
        returned = collectives.all_to_all(by_source, send, receive, record.world)
        # Rows beyond the last offset were never sent (padding, dropped tokens): they are zero, not garbage.
        return scatter_rows(returned, order, num_rows, out=home)

    planning = record.planning(homeward=True)
    return Job(record.world.queue, run, meanwhile=planning, label=record.placer.label("exchange_back"))


def _exchange_back_fake(
    rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, num_rows: int, layer: int
) -> Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


define_collective(
    "gather_counts(Tensor offsets, Tensor placement, int layer) -> Tensor",
    _gather_counts,
    _gather_counts_fake,
    role="exchange",
    carries="counts",
    ring_rounds=1,
    saved_in_checkpoints="always",
)
define(
    "calibrate(Tensor counts, Tensor placement, int layer) -> (Tensor, Tensor)",
    _calibrate,
    _calibrate_fake,
    plans=True,
)
define(
    "route(Tensor counts, Tensor placement, Tensor offsets, SymInt slots, int chunks, int layer) -> Tensor[]",
    _route,
    _route_fake,
    plans=True,
)
define(
    "route_fixed(Tensor counts, Tensor placement, Tensor offsets, SymInt slots, SymInt rows, int percent, int layer) "
    "-> Tensor[]",
    _route_fixed,
    _route_fixed_fake,
    plans=True,
)
define("count_rows(Tensor offsets, int layer) -> Tensor", _count_rows, _count_rows_fake)
define_collective(
    "exchange(Tensor rows, Tensor splits, Tensor send_index, Tensor receive_index, int layer) -> Tensor",
    _exchange,
    _exchange_fake,
    role="exchange",
    carries="rows",
    saved_in_checkpoints="always",
)
define_collective(
    "exchange_back(Tensor rows, Tensor splits, Tensor send_index, Tensor receive_index, "
    "SymInt num_rows, int layer) -> Tensor",
    _exchange_back,
    _exchange_back_fake,
    role="exchange",
    carries="rows",
    homeward=True,
    saved_in_checkpoints="always",
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


differentiate("exchange", _exchange_backward, _exchange_setup)
differentiate("exchange_back", _exchange_back_backward, _exchange_back_setup)
