"""Carries rows and experts by collectives of ``torch.distributed``, whose sizes the host knows.

Counts of rows come to the host, which plans with them and gives every all-to-all its split sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.scatter_rows import scatter_rows
from hecate.runtime.ops import sparse_collectives
from hecate.runtime.ops.ticket import make_tickets
from hecate.runtime.placement.placement import Placement
from hecate.runtime.state.layer import Layer, Replays, Ticket
from hecate.runtime.state.placer import Placer


class ByCollectives:
    """The :class:`~hecate.runtime.state.layer.Carrier` of ``Config(transport="collectives")``."""

    room_percent = 0
    counts_stay = False

    def place(self, layer: Layer) -> tuple[Tensor, Tensor]:
        placement = layer.placer.take()
        layer.replicas = placement.num_replicas
        return as_tensors(placement, layer)

    def gather_counts(self, layer: Layer, counts: Tensor) -> Job:
        world, placer = layer.world, layer.placer
        plans = placer.model.signature

        def run() -> Tensor:
            # The proof is taken here, and not above: all earlier collectives of the queue are in it by now.
            device = world.counts_device
            signature = collectives.on_device(np.array([plans, *collectives.proof(world)], dtype=np.int64), device)
            return collectives.on_host(collectives.all_gather_even(torch.cat([counts.to(device), signature]), world))

        def finish(gathered: Tensor) -> Tensor:
            placer.model.check(gathered[:, -3:])
            layer.counted = gathered[:, :-3].contiguous()
            layer.bytes_sent = layer.node_bytes_sent = 0
            placer.observe(layer.counted.numpy())
            return layer.counted.clone()

        return layer.job("gather_counts", run, finish=finish, on_host=True)

    def route(
        self, layer: Layer, counts: Tensor, placement: Placement, like: Tensor, *, rows: int, chunks: int
    ) -> list[Tensor]:
        quotas = layer.placer.assign(placement, counts.numpy())
        tickets = make_tickets(quotas, like.device, chunks)
        layer.rows = sum(int(ticket.splits[1].sum()) for ticket in tickets)
        return [
            part
            for ticket in tickets
            for part in (ticket.slot_offsets, ticket.splits, ticket.send_index, ticket.receive_index)
        ]

    def ticket_like(self, counts: Tensor, like: Tensor, *, rows: int) -> list[Tensor]:
        ctx = torch.library.get_ctx()
        return [
            torch.empty((2, counts.shape[0]), dtype=torch.int64, device="cpu"),
            like.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
            like.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        ]

    def dispatch(self, layer: Layer, rows: Tensor, ticket: Ticket) -> Job:
        splits, send_index, receive_index = ticket
        send, receive = splits.tolist()
        layer.count_rows_sent(rows, send)
        leaving, order = gather_rows(rows, send_index, layer.wire_of(rows)), receive_index.clone()
        arrived = rows.new_empty((order.shape[0], *rows.shape[1:]))

        def run() -> Tensor:
            return gather_rows(collectives.all_to_all(leaving, send, receive, layer.world), order, out=arrived)

        return layer.job("exchange", run, meanwhile=layer.planning(homeward=False))

    def combine(self, layer: Layer, rows: Tensor, ticket: Ticket, num_rows: int) -> Job:
        splits, send_index, receive_index = ticket
        receive, send = splits.tolist()
        layer.count_rows_sent(rows, send)
        by_source = scatter_rows(rows, receive_index, rows.shape[0], layer.wire_of(rows))
        order, home = send_index.clone(), rows.new_empty((num_rows, *rows.shape[1:]))

        def run() -> Tensor:
            returned = collectives.all_to_all(by_source, send, receive, layer.world)
            # Rows behind the last offset were never sent (padding, dropped tokens): they are zero, not garbage.
            return scatter_rows(returned, order, num_rows, out=home)

        return layer.job("exchange_back", run, meanwhile=layer.planning(homeward=True))

    def gather_replicas(self, layer: Layer, shards: Sequence[Tensor], placement: Placement) -> Job:
        run = sparse_collectives.gather(shards, layer.placer.travels(placement), layer.world)
        return layer.job("sparse_all_gather", run)

    def reduce_replicas(
        self, layer: Layer, own: Sequence[Tensor], replicas: Sequence[Tensor], placement: Placement
    ) -> Job:
        run = sparse_collectives.scatter(own, replicas, layer.placer.travels(placement), layer.world)
        return layer.job("sparse_reduce_scatter", run)

    def settle(self, *, whole: bool = False) -> None:
        """Do nothing: the host knows all that has travelled."""

    def forget(self) -> None:
        """Do nothing."""

    def replays(self, placer: Placer) -> Replays:
        return Replays()


def as_tensors(placement: Placement, layer: Layer) -> tuple[Tensor, Tensor]:
    """Return a placement as graphs carry it: int8 ``[E, W]``, and the experts of own replicas, int64 ``[K]``."""
    replicas = placement.replicas_on(layer.world.rank)
    return torch.from_numpy(placement.matrix.copy()), torch.from_numpy(replicas.copy())
