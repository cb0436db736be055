"""Carries rows to each node once, by collectives, where a rank of that node passes them on.

A token with several experts in one node has its row sent there once, and the sum of its results comes back.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.collectives import on_device
from hecate.runtime.comm.queue import Job
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.scatter_rows import scatter_rows
from hecate.runtime.ops.by_collectives import ByCollectives
from hecate.runtime.ops.node_ticket import NODE_TICKET_PARTS, arriving, leaving, message_lengths, passing
from hecate.runtime.placement.placement import Placement
from hecate.runtime.state.layer import Layer, Ticket


class ByNodes(ByCollectives):
    """The :class:`~hecate.runtime.state.layer.Relaying` carrier of ``Config(dispatch="nodes")`` and ``"auto"``."""

    def route_nodes(self, layer: Layer, tokens: Tensor, counts: Tensor, placement: Placement, ticket: Ticket) -> Job:
        world, topology = layer.world, layer.placer.model.topology
        splits, send_index, receive_index = ticket
        device, rank = receive_index.device, world.rank
        sent, received = splits.numpy()
        lengths = message_lengths(counts.numpy(), placement, topology)
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
            splits = np.stack([out.sent, through.received, through.sent, into.received])
            indexes = (out.send_index, through.middle_index, into.receive_index)
            return [torch.from_numpy(splits), *(on_device(index, device) for index in indexes)]

        return layer.job("route_nodes", run, finish=finish, on_host=True)

    def dispatch(self, layer: Layer, rows: Tensor, ticket: Ticket) -> Job:
        if len(ticket) != NODE_TICKET_PARTS:
            return super().dispatch(layer, rows, ticket)
        splits, send_index, middle_index, receive_index = ticket
        out, into, spread, collected = splits.tolist()
        layer.count_rows_sent(rows, out, spread)
        going, middle = gather_rows(rows, send_index, layer.wire_of(rows)), middle_index.clone()
        order, arrived = receive_index.clone(), rows.new_empty((receive_index.shape[0], *rows.shape[1:]))

        def run() -> Tensor:
            here = collectives.all_to_all(going, out, into, layer.world)
            copies = _inside(gather_rows(here, middle), spread, collected, layer)
            return gather_rows(copies, order, out=arrived)

        return layer.job("exchange_nodes", run, meanwhile=layer.planning(homeward=False))

    def combine(self, layer: Layer, rows: Tensor, ticket: Ticket, num_rows: int) -> Job:
        if len(ticket) != NODE_TICKET_PARTS:
            return super().combine(layer, rows, ticket, num_rows)
        splits, send_index, middle_index, receive_index = ticket
        out, into, spread, collected = splits.tolist()
        wire = layer.wire_of(rows)
        layer.count_rows_sent(rows, collected, into)
        by_relay = scatter_rows(rows, receive_index, rows.shape[0], wire)
        middle, order = middle_index.clone(), send_index.clone()
        home = rows.new_empty((num_rows, *rows.shape[1:]))

        def run() -> Tensor:
            copies = _inside(by_relay, collected, spread, layer)
            sums = _sum_rows(copies, middle, sum(into)).to(wire)
            returned = collectives.all_to_all(sums, into, out, layer.world)
            return scatter_rows(returned, order, num_rows, out=home)

        return layer.job("exchange_nodes_back", run, meanwhile=layer.planning(homeward=True))


def _inside(rows: Tensor, send: list[int], receive: list[int], layer: Layer) -> Tensor:
    topology = layer.placer.model.topology
    # Where every rank is alone in its node there is nothing to send.
    if topology.num_nodes == topology.world_size:
        return rows
    return collectives.all_to_all(rows, send, receive, layer.world)


def _sum_rows(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum rows to ``[count, ...]``, in their order and in at least fp32, so that the result is the same each time."""
    wide = rows.float() if rows.dtype.itemsize < 4 else rows
    sums = wide.new_zeros((count, *rows.shape[1:]))
    if rows.device.type != "cpu":
        # index_add_ on a GPU adds in any order; this sorts by index first.
        return sums.index_put_((index,), wide, accumulate=True)
    return sums.index_add_(0, index, wide)
