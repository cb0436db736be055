"""Operators that bring rows to experts and results back.

| operator | shapes | backward |
|---|---|---|
| ``gather_counts`` | ``[E] -> [W,E]``, rows of every rank for every expert; after ``place`` | none |
| ``calibrate`` | ``[W,E], [E,W] -> [E,W], [S']``, the placement after the gate | none |
| ``route`` | ``[W,E], [E,W] -> [S], [2,W], [n], [R']``, ends of the slots, and an exchange's ticket; n times | none |
| ``count_rows`` | ``[E] -> [E]``, a copy; stands for ``route`` at one rank | none |
| ``exchange`` | ``[R,...] -> [R',...]`` | ``exchange_back`` with the same ticket |
| ``exchange_back`` | ``[R',...] -> [R,...]`` | ``exchange`` with the same ticket |
| ``route_nodes`` | ``[R], [W,E], [E,W], [2,W], [n], [R'] -> [4,W], [u], [m], [R']``, a ticket by nodes | none |
| ``exchange_nodes`` | as ``exchange``, by such a ticket | ``exchange_nodes_back`` |
| ``exchange_nodes_back`` | as ``exchange_back`` | ``exchange_nodes`` |

The layer's carrier (``hecate.runtime.state.layer``) does the work. With one that bounds the room for rows a ticket is
``[3,W], [R], [C]`` on the device, and R' is C, the room that R rows give.

By nodes a token's row comes to each node once, and the sum of its results goes back. That is right where rows of one
token are equal on the way there, and only the sum over a token's rows is used on the way back: the sum of the rows
that come from one node stands in one of them, the others are zero (``hecate.passes.analysis.node_rows`` proves both).
``choices`` is for the planner: how many rows each token has, 0 if that is not known.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hecate.runtime.comm.queue import Job
from hecate.runtime.ops.by_collectives import as_tensors
from hecate.runtime.ops.experts import placement_fake
from hecate.runtime.ops.registration import define, define_collective, differentiate
from hecate.runtime.state.layer import Relaying, get_layer


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


def _route_nodes(
    tokens: Tensor,
    counts: Tensor,
    placement: Tensor,
    splits: Tensor,
    send_index: Tensor,
    receive_index: Tensor,
    choices: int,
    layer: int,
) -> Job:
    record = get_layer(layer)
    if choices and record.sizes.together != choices:
        # Plans of this layer count tokens from now on, on all ranks.
        record.placer.sizes = replace(record.sizes, together=choices)
    assert isinstance(record.carrier, Relaying), "passes ask for tickets by nodes only of carriers that relay"
    used = record.placer.find(placement)
    return record.carrier.route_nodes(record, tokens, counts, used, (splits, send_index, receive_index))


def _route_nodes_fake(*given: Any) -> list[Tensor]:
    *_, send_index, receive_index, _, layer = given
    ctx = torch.library.get_ctx()
    return [
        torch.empty((4, get_layer(layer).world.size), dtype=torch.int64, device="cpu"),
        send_index.new_empty((ctx.new_dynamic_size(),)),
        send_index.new_empty((ctx.new_dynamic_size(),)),
        torch.empty_like(receive_index),
    ]


def _dispatch(rows: Tensor, *given: Any) -> Job:
    *ticket, layer = given
    record = get_layer(layer)
    return record.carrier.dispatch(record, rows, ticket)


def _dispatch_fake(rows: Tensor, *given: Any) -> Tensor:
    *_, receive_index, _ = given
    return rows.new_empty((receive_index.shape[0], *rows.shape[1:]))


def _combine(rows: Tensor, *given: Any) -> Job:
    *ticket, num_rows, layer = given
    record = get_layer(layer)
    return record.carrier.combine(record, rows, ticket, num_rows)


def _combine_fake(rows: Tensor, *given: Any) -> Tensor:
    *_, num_rows, _ = given
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
    lambda counts, placement, layer: placement_fake(counts, layer),
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
    lambda offsets, layer: torch.empty_like(offsets),
    results="offsets",
)
define_collective(
    "route_nodes(Tensor tokens, Tensor counts, Tensor placement, Tensor splits, Tensor send_index, "
    "Tensor receive_index, int choices, int layer) -> Tensor[]",
    _route_nodes,
    _route_nodes_fake,
    role="exchange",
    carries="tickets",
    saved_in_checkpoints="always",
    results="node_splits, node_send_index, node_middle_index, node_receive_index[R']",
    whole="node_ticket",
)


def _define_exchange(there: str, back: str, ticket: str, *, hops: Literal[1, 2] = 1) -> None:
    """Register ``there(rows, *ticket, layer)`` and ``back(rows, *ticket, num_rows, layer)``, its transpose."""
    carry = partial(define_collective, role="exchange", carries="rows", hops=hops, saved_in_checkpoints="always")
    carry(f"{there}(Tensor rows, {ticket}, int layer) -> Tensor", _dispatch, _dispatch_fake, results="rows")
    carry(
        f"{back}(Tensor rows, {ticket}, SymInt num_rows, int layer) -> Tensor",
        _combine,
        _combine_fake,
        homeward=True,
        results="results",
    )
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


_define_exchange("exchange", "exchange_back", "Tensor splits, Tensor send_index, Tensor receive_index")
_define_exchange(
    "exchange_nodes",
    "exchange_nodes_back",
    "Tensor splits, Tensor send_index, Tensor middle_index, Tensor receive_index",
    hops=2,
)
