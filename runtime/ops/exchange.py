"""Operators that bring rows to experts and results back.

| operator | shapes | backward |
|---|---|---|
| ``gather_counts`` | ``[E] -> [W,E]``, rows of every rank for every expert; after ``place`` | none |
| ``calibrate`` | ``[W,E], [E,W] -> [E,W], [S']``, the placement after the gate | none |
| ``route`` | ``[W,E], [E,W] -> [S], [2,W], [n], [R']``, ends of the slots, and an exchange's ticket; n times | none |
| ``count_rows`` | ``[E] -> [E]``, a copy; stands for ``route`` at one rank | none |
| ``exchange`` | ``[R,...] -> [R',...]`` | ``exchange_back`` with the same ticket |
| ``exchange_back`` | ``[R',...] -> [R,...]`` | ``exchange`` with the same ticket |

The layer's carrier (``hecate.runtime.state.layer``) does the work. With one that bounds the room for rows a ticket is
``[3,W], [R], [C]`` on the device, and R' is C, the room that R rows give.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.runtime.comm.queue import Job
from hecate.runtime.ops.by_collectives import as_tensors
from hecate.runtime.ops.experts import placement_fake
from hecate.runtime.ops.registration import define, define_collective, differentiate
from hecate.runtime.state.layer import get_layer


def _gather_counts(offsets: Tensor, placement: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    counts = torch.diff(offsets.to(torch.int64), prepend=offsets.new_zeros(1, dtype=torch.int64))
    return record.carrier.gather_counts(record, counts)


def _gather_counts_fake(offsets: Tensor, placement: Tensor, layer: int) -> Tensor:
    record = get_layer(layer)
    device = offsets.device if record.carrier.counts_stay else "cpu"
    return torch.empty((record.world.size, record.num_experts), dtype=torch.int64, device=device)


def _calibrate(counts: Tensor, placement: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    record = get_layer(layer)
    calibrated = record.placer.calibrate(record.placer.find(placement), counts.numpy())
    record.replicas = calibrated.num_replicas
    return as_tensors(calibrated, record)


def _calibrate_fake(counts: Tensor, placement: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return placement_fake(counts, layer)


def _route(
    counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, rows: int, chunks: int, layer: int
) -> list[Tensor]:
    record = get_layer(layer)
    used = record.placer.find(placement)
    return record.carrier.route(record, counts, used, offsets, rows=rows, chunks=chunks)


def _route_fake(
    counts: Tensor, placement: Tensor, offsets: Tensor, slots: int, rows: int, chunks: int, layer: int
) -> list[Tensor]:
    carrier, found = get_layer(layer).carrier, list[Tensor]()
    for _ in range(chunks):
        ends = offsets.new_empty((slots,), dtype=torch.int32)
        found += [ends, *carrier.ticket_like(counts, offsets, rows=rows)]
    return found


def _count_rows(offsets: Tensor, layer: int) -> Tensor:
    # Offsets stay on the device, and are not even subtracted before counts are read: the host would launch
    # that.
    get_layer(layer).counted = offsets.clone()
    # A copy of its own, since a compiled graph may write over its results.
    return offsets.clone()


def _count_rows_fake(offsets: Tensor, layer: int) -> Tensor:
    return torch.empty_like(offsets)


def _exchange(rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, layer: int) -> Job:
    record = get_layer(layer)
    return record.carrier.dispatch(record, rows, (splits, send_index, receive_index))


def _exchange_fake(rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, layer: int) -> Tensor:
    return rows.new_empty((receive_index.shape[0], *rows.shape[1:]))


def _exchange_back(
    rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, num_rows: int, layer: int
) -> Job:
    record = get_layer(layer)
    return record.carrier.combine(record, rows, (splits, send_index, receive_index), num_rows)


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
    results="counts",
)
define(
    "calibrate(Tensor counts, Tensor placement, int layer) -> (Tensor, Tensor)",
    _calibrate,
    _calibrate_fake,
    plans=True,
    results="placement, slots[K]",
    whole="calibrated",
)
define(
    "route(Tensor counts, Tensor placement, Tensor offsets, SymInt slots, SymInt rows, int chunks, int layer) "
    "-> Tensor[]",
    _route,
    _route_fake,
    plans=True,
    results="offsets[S], splits, send_index[R], receive_index[R']",
    whole="ticket",
)
define(
    "count_rows(Tensor offsets, int layer) -> Tensor",
    _count_rows,
    _count_rows_fake,
    results="offsets",
)
define_collective(
    "exchange(Tensor rows, Tensor splits, Tensor send_index, Tensor receive_index, int layer) -> Tensor",
    _exchange,
    _exchange_fake,
    role="exchange",
    carries="rows",
    saved_in_checkpoints="always",
    results="rows",
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
    results="results",
)


def differentiate_exchange(there: str, back: str) -> None:
    """Make ``there(rows, *ticket, layer)`` and ``back(rows, *ticket, num_rows, layer)`` each other's backward."""
    dispatch, combine = (getattr(torch.ops.hecate, name) for name in (there, back))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, *ticket, ctx.layer = inputs
        ctx.num_rows = rows.shape[0]
        ctx.save_for_backward(*ticket)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = combine(grad, *ctx.saved_tensors, ctx.num_rows, ctx.layer)
        return rows, *[None] * len(ctx.saved_tensors), None

    def keep_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ticket, _, ctx.layer = inputs
        ctx.save_for_backward(*ticket)

    def backward_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = dispatch(grad, *ctx.saved_tensors, ctx.layer)
        return rows, *[None] * len(ctx.saved_tensors), None, None

    differentiate(there, backward, keep)
    differentiate(back, backward_back, keep_back)


differentiate_exchange("exchange", "exchange_back")
