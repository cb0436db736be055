"""Operators that bring a token's row to each node once, and the sum of its results back.

| operator | shapes | backward |
|---|---|---|
| ``route_nodes`` | ``[R], [W,E], [E,W], [2,W], [n], [R'] -> [4,W], [u], [m], [R']``, a ticket by nodes | none |
| ``exchange_nodes`` | ``[R,...] -> [R',...]`` | ``exchange_nodes_back`` with the same ticket |
| ``exchange_nodes_back`` | ``[R',...] -> [R,...]`` | ``exchange_nodes`` with the same ticket |

They are right where rows of one token are equal on the way there, and only the sum over a token's rows is used on the
way back: the sum of the rows that come from one node stands in one of them, the others are zero
(``hecate.passes.captured.node_rows`` proves both). Each is the transpose of the other.
``choices`` is for the planner: how many rows each token has, 0 if that is not known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.collectives import on_device
from hecate.runtime.comm.queue import Job
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.scatter_rows import scatter_rows
from hecate.runtime.ops.node_ticket import arriving, leaving, message_lengths, passing, splits_of
from hecate.runtime.ops.registration import define_collective, differentiate
from hecate.runtime.state.layer import Layer, get_layer


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
    world, topology = record.world, record.placer.model.topology
    device, rank = receive_index.device, world.rank
    sent, received = splits.numpy()
    lengths = message_lengths(counts.numpy(), record.placer.find(placement), topology)
    out = leaving(
        tokens.cpu().numpy().astype(np.int64), sent, send_index.cpu().numpy(), lengths[rank], topology, rank
    )
    into = arriving(received, receive_index.cpu().numpy(), topology, rank)
    send, receive = lengths[rank].tolist(), lengths[:, rank].tolist()

    def run() -> Tensor:
        messages = on_device(out.messages, world.counts_device)
        return collectives.on_host(collectives.all_to_all(messages, send, receive, world))

    def finish(messages: Tensor) -> list[Tensor]:
        through = passing(messages.numpy(), lengths[:, rank], topology, rank)
        indexes = (out.send_index, through.middle_index, into.receive_index)
        return [torch.from_numpy(splits_of(out, through, into)), *(on_device(index, device) for index in indexes)]

    return Job(world.queue, run, finish=finish, on_host=True, label=record.placer.label("route_nodes"))


def _route_nodes_fake(
    tokens: Tensor,
    counts: Tensor,
    placement: Tensor,
    splits: Tensor,
    send_index: Tensor,
    receive_index: Tensor,
    choices: int,
    layer: int,
) -> list[Tensor]:
    ctx = torch.library.get_ctx()
    return [
        torch.empty((4, get_layer(layer).world.size), dtype=torch.int64, device="cpu"),
        send_index.new_empty((ctx.new_dynamic_size(),)),
        send_index.new_empty((ctx.new_dynamic_size(),)),
        torch.empty_like(receive_index),
    ]


def _exchange_nodes(
    rows: Tensor, splits: Tensor, send_index: Tensor, middle_index: Tensor, receive_index: Tensor, layer: int
) -> Job:
    record = get_layer(layer)
    out, into, spread, collected = splits.tolist()
    record.count_rows_sent(rows, out, spread)
    going, middle = gather_rows(rows, send_index, record.wire_of(rows)), middle_index.clone()
    order, arrived = receive_index.clone(), rows.new_empty((receive_index.shape[0], *rows.shape[1:]))

    def run() -> Tensor:
        here = collectives.all_to_all(going, out, into, record.world)
        copies = _inside(gather_rows(here, middle), spread, collected, record)
        return gather_rows(copies, order, out=arrived)

    planning = record.planning(homeward=False)
    return Job(record.world.queue, run, meanwhile=planning, label=record.placer.label("exchange_nodes"))


def _exchange_nodes_fake(
    rows: Tensor, splits: Tensor, send_index: Tensor, middle_index: Tensor, receive_index: Tensor, layer: int
) -> Tensor:
    return rows.new_empty((receive_index.shape[0], *rows.shape[1:]))


def _exchange_nodes_back(
    rows: Tensor,
    splits: Tensor,
    send_index: Tensor,
    middle_index: Tensor,
    receive_index: Tensor,
    num_rows: int,
    layer: int,
) -> Job:
    record = get_layer(layer)
    out, into, spread, collected = splits.tolist()
    wire = record.wire_of(rows)
    record.count_rows_sent(rows, collected, into)
    by_relay = scatter_rows(rows, receive_index, rows.shape[0], wire)
    middle, order = middle_index.clone(), send_index.clone()
    home = rows.new_empty((num_rows, *rows.shape[1:]))

    def run() -> Tensor:
        copies = _inside(by_relay, collected, spread, record)
        sums = _sum_rows(copies, middle, sum(into)).to(wire)
        returned = collectives.all_to_all(sums, into, out, record.world)
        return scatter_rows(returned, order, num_rows, out=home)

    planning = record.planning(homeward=True)
    return Job(record.world.queue, run, meanwhile=planning, label=record.placer.label("exchange_nodes_back"))


def _exchange_nodes_back_fake(
    rows: Tensor,
    splits: Tensor,
    send_index: Tensor,
    middle_index: Tensor,
    receive_index: Tensor,
    num_rows: int,
    layer: int,
) -> Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


def _inside(rows: Tensor, send: list[int], receive: list[int], record: Layer) -> Tensor:
    """The hop inside nodes; none where every rank is alone in its node."""
    topology = record.placer.model.topology
    if topology.num_nodes == topology.world_size:
        return rows
    return collectives.all_to_all(rows, send, receive, record.world)


def _sum_rows(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """``[count, ...]``, in the order of the rows and in at least fp32, so that it is the same each time."""
    wide = rows.float() if rows.dtype.itemsize < 4 else rows
    sums = wide.new_zeros((count, *rows.shape[1:]))
    if rows.device.type != "cpu":
        # index_add_ on a GPU adds in any order; this sorts by index first.
        return sums.index_put_((index,), wide, accumulate=True)
    return sums.index_add_(0, index, wide)


define_collective(
    "route_nodes(Tensor tokens, Tensor counts, Tensor placement, Tensor splits, Tensor send_index, "
    "Tensor receive_index, int choices, int layer) -> Tensor[]",
    _route_nodes,
    _route_nodes_fake,
    role="exchange",
    carries="tickets",
    saved_in_checkpoints="always",
)
define_collective(
    "exchange_nodes(Tensor rows, Tensor splits, Tensor send_index, Tensor middle_index, Tensor receive_index, "
    "int layer) -> Tensor",
    _exchange_nodes,
    _exchange_nodes_fake,
    role="exchange",
    carries="rows",
    hops=2,
    saved_in_checkpoints="always",
)
define_collective(
    "exchange_nodes_back(Tensor rows, Tensor splits, Tensor send_index, Tensor middle_index, Tensor receive_index, "
    "SymInt num_rows, int layer) -> Tensor",
    _exchange_nodes_back,
    _exchange_nodes_back_fake,
    role="exchange",
    carries="rows",
    homeward=True,
    hops=2,
    saved_in_checkpoints="always",
)


def _exchange_nodes_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, *ticket, ctx.layer = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(*ticket)


def _exchange_nodes_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.hecate.exchange_nodes_back(grad, *ctx.saved_tensors, ctx.num_rows, ctx.layer)
    return back, None, None, None, None, None


def _exchange_nodes_back_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ticket, _, ctx.layer = inputs
    ctx.save_for_backward(*ticket)


def _exchange_nodes_back_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    there = torch.ops.hecate.exchange_nodes(grad, *ctx.saved_tensors, ctx.layer)
    return there, None, None, None, None, None, None


differentiate("exchange_nodes", _exchange_nodes_backward, _exchange_nodes_setup)
differentiate("exchange_nodes_back", _exchange_nodes_back_backward, _exchange_nodes_back_setup)
