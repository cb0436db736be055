"""The one-sided carrier, with a bound of the rows that come: the host never learns how many rows go where.

A rank that has R rows has room for so many percent of R, so every shape is known before anything has run. Rows that
come lie in the front of that room; after them are zeros.

**The host learns late.** Counts, and whether there was room, are copied to the host while it goes on, and read at
:meth:`OneSided.settle`: when the next forward begins, before an optimizer steps or a scaler looks at gradients, when
statistics or a checkpoint ask, and at the end of a forward without gradients. All ranks are at the same place there.

**More rows than there is room for.** Nothing of such an exchange travels, on no rank. Each rank gets NaN instead, and
``settle`` raises before an optimizer takes it, so the step can be made again. Where an optimizer's step is compiled
or parameters are updated by hand, the next forward raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.comm.world import World
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.launch import on_amd
from hecate.runtime.kernels.operands import FLOATS
from hecate.runtime.one_sided.device_dispatch import bounded_ticket, room_for
from hecate.runtime.one_sided.device_tables import FixedTables, LayerTables, Recorded
from hecate.runtime.one_sided.exchanges import Exchanges, gather_replicas, reduce_replicas
from hecate.runtime.one_sided.links import MOST_RANKS, Rows, rows_of_places
from hecate.runtime.one_sided.transport import LateNews, Message
from hecate.runtime.ops.by_collectives import as_tensors
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Layer, Replays, Ticket
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.settle import ExchangeFailed, settle_before_optimizers


class OneSided:
    """The :class:`~hecate.runtime.state.layer.Carrier` of ``Config(transport="symmetric")``.

    ``recorded`` are the tables that recorded launches read in place of the placements that graphs carry.
    """

    counts_stay = True

    def __init__(self, exchanges: Exchanges, room_percent: int) -> None:
        self.exchanges, self.room_percent = exchanges, room_percent
        self.news = LateNews(exchanges.transport)
        self.recorded: Recorded | None = None
        # The last placement of each layer, with its tables.
        self._tables: dict[int, tuple[Placement, LayerTables]] = {}
        settle_before_optimizers(self)

    @classmethod
    def between(cls, world: World, topology: Topology, room_percent: int) -> OneSided:
        """Create a carrier over memory that the ranks of ``world`` share. A collective.

        Raises ValueError if ranks are too many, on several nodes, or on other devices; RuntimeError if memory is not
        shared.
        """
        _check_ranks(topology, world)
        return cls(Exchanges.between(world), room_percent)

    # --- placements and counts ---

    def place(self, layer: Layer) -> tuple[Tensor, Tensor]:
        if self.recorded is not None:
            # Replays take placements. Graphs carry the first one, and the number of replicas for which there is room.
            tables = self.recorded.layers[layer.id]
            layer.replicas = tables.placement.num_replicas
            return torch.from_numpy(tables.first.matrix.copy()), torch.full((tables.room.replicas,), -1, device="cpu")
        placement = layer.placer.take()
        layer.replicas = placement.num_replicas
        return as_tensors(placement, layer)

    def gather_counts(self, layer: Layer, counts: Tensor) -> Job:
        placer, size = layer.placer, layer.world.size
        plans, learning = placer.model.signature, placer.model.learning

        def run() -> Tensor:
            message = torch.cat([counts, self._signature(plans)])
            leaving = message.expand(size, -1).contiguous()
            out = torch.empty_like(leaving)
            one = torch.ones(size, dtype=torch.int64, device=counts.device)
            self.exchanges.exchange(Rows(leaving), one, Rows(out), most=1, wire=torch.int64, expects=one)
            return out

        def tell(gathered: Tensor) -> None:
            placer.model.check(gathered[:, -3:])
            if learning:
                placer.remember(gathered[:, :-3].numpy())

        def finish(gathered: Tensor) -> Tensor:
            layer.counted = gathered[:, :-3].contiguous()
            layer.bytes_sent = layer.node_bytes_sent = 0
            layer.unread.clear()
            self.news.send(gathered, tell)
            return layer.counted.clone()

        return layer.job("gather_counts", run, finish=finish)

    def signature(self, plans: int) -> Tensor:
        """Return int64 ``[3]`` on the device, which travels with counts: digest of plans and proof of collectives."""
        world = self.exchanges.world
        return collectives.on_device(np.array([plans, *collectives.proof(world)], dtype=np.int64), world.device)

    def _signature(self, plans: int) -> Tensor:
        return self.signature(plans) if self.recorded is None else self.recorded.signature

    def tables_of(self, placement: Placement, layer: Layer) -> LayerTables:
        """Return the tables of a placement on the device."""
        if self.recorded is not None:
            return self.recorded.layers[layer.id].tables
        known = self._tables.get(layer.id)
        if known is None or known[0] != placement:
            tables = LayerTables.from_placement(placement, layer).on(layer.world.device)
            known = self._tables[layer.id] = placement, tables
        return known[1]

    # --- rows ---

    def route(
        self, layer: Layer, counts: Tensor, placement: Placement, like: Tensor, *, rows: int, chunks: int
    ) -> list[Tensor]:
        percent = self.room_percent
        ticket = bounded_ticket(counts, self.tables_of(placement, layer).rows, rows=rows, percent=percent)
        # The splits are copied: a graph may use the memory of its values again.
        layer.arrived = ticket.splits[1].clone()

        def tell(numbers: Tensor) -> None:
            excess, own = numbers.tolist()
            if any(excess):
                raise ExchangeFailed(_no_room(layer.placer.label("rows"), excess, own, percent))

        self.news.send(torch.stack([ticket.splits[2], counts.sum(1)]), tell)
        return [ticket.slot_offsets, ticket.splits, ticket.send_index, ticket.receive_index]

    def ticket_like(self, counts: Tensor, like: Tensor, *, rows: int) -> list[Tensor]:
        room = room_for(rows, self.room_percent)
        return [counts.new_empty((3, counts.shape[0])), counts.new_empty((rows,)), counts.new_empty((room,))]

    def dispatch(self, layer: Layer, rows: Tensor, ticket: Ticket) -> Job:
        splits, send_index, receive_index = ticket
        dtype, wire, shape = rows.dtype, layer.wire_of(rows), rows.shape[1:]
        leaving, parts, order = gather_rows(rows, send_index, wire), splits.clone(), receive_index.clone()
        layer.count_rows_later(rows, parts[0])
        most = max(leaving.shape[0], order.shape[0])
        out = rows.new_empty((order.shape[0], *shape), dtype=_lands_as(dtype, wire))

        def run() -> Tensor:
            self.exchanges.exchange(
                Rows(leaving),
                parts[0],
                Rows(out, rows_of_places(order)),
                most=most,
                wire=wire,
                expects=parts[1],
                excess=parts[2],
            )
            return out.to(dtype)

        return layer.job("exchange", run)

    def combine(self, layer: Layer, rows: Tensor, ticket: Ticket, num_rows: int) -> Job:
        splits, send_index, receive_index = ticket
        dtype, wire, shape = rows.dtype, layer.wire_of(rows), rows.shape[1:]
        parts, order = splits.clone(), send_index.clone()
        leaving = gather_rows(rows, rows_of_places(receive_index), wire, used=parts[1].sum(0, keepdim=True))
        layer.count_rows_later(rows, parts[1])
        most = max(leaving.shape[0], num_rows)
        out = rows.new_empty((num_rows, *shape), dtype=_lands_as(dtype, wire))

        def run() -> Tensor:
            self.exchanges.exchange(
                Rows(leaving), parts[1], Rows(out, order), most=most, wire=wire, expects=parts[0], excess=parts[2]
            )
            return out.to(dtype)

        # Plans are made when the next forward takes them: until then the host does not know the counts.
        return layer.job("exchange_back", run)

    # --- experts ---

    def gather_replicas(self, layer: Layer, shards: Sequence[Tensor], placement: Placement) -> Job:
        run = gather_replicas(self.exchanges, self.tables_of(placement, layer).experts, shards)
        return layer.job("sparse_all_gather", run)

    def reduce_replicas(
        self, layer: Layer, own: Sequence[Tensor], replicas: Sequence[Tensor], placement: Placement
    ) -> Job:
        run = reduce_replicas(self.exchanges, self.tables_of(placement, layer).experts, own, replicas)
        return layer.job("sparse_reduce_scatter", run)

    # --- what the host learns ---

    def settle(self, *, whole: bool = False) -> None:
        self.news.read()
        if whole:
            self.exchanges.transport.check()

    def forget(self) -> None:
        self.news.take()

    def replays(self, placer: Placer) -> FollowedTables:
        return FollowedTables(self, placer)


class FollowedTables(Replays):
    """Tables of a :class:`OneSided` that replays follow."""

    def __init__(self, carrier: OneSided, placer: Placer) -> None:
        self._carrier, self._placer = carrier, placer
        self._now: Recorded | None = None
        self._before: Recorded | None = None
        self._messages: list[Message] = []

    def prepare(self, placements: Mapping[Layer, Placement]) -> None:
        had = {} if self._before is None else self._before.layers
        tables = {
            layer.id: FixedTables.of(placement, layer, had.get(layer.id)) for layer, placement in placements.items()
        }
        self._now = Recorded(tables, self._carrier.signature(self._placer.signature))

    def forget(self) -> None:
        self._before, self._now, self._messages = self._now, None, []

    def have_room(self, placements: Mapping[Layer, Placement]) -> bool:
        now = self._now
        return now is not None and all(
            now.layers[layer.id].has_room_for(placement) for layer, placement in placements.items()
        )

    def write(self, placements: Mapping[Layer, Placement]) -> None:
        assert self._now is not None, "nothing was recorded"
        for layer, placement in placements.items():
            self._now.layers[layer.id].write(placement, layer)
        self._now.signature.copy_(self._carrier.signature(self._placer.signature), non_blocking=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._carrier.recorded = self._now
        try:
            yield
        finally:
            self._carrier.recorded = None

    def recorded(self) -> None:
        self._messages = self._carrier.news.take()

    def tell_again(self, forward_ends: object) -> None:
        self._carrier.news.send_again(self._messages, forward_ends)


def _check_ranks(topology: Topology, world: World) -> None:
    problem = ""
    if world.everyone is not world:
        problem = "all ranks in one group: a step that has no room in one group would go on in the others"
    elif topology.num_nodes > 1:
        problem = f"ranks on one node, and there are {topology.num_nodes} nodes"
    elif world.size > MOST_RANKS:
        problem = f"at most {MOST_RANKS} ranks, and there are {world.size}"
    elif world.device.type not in ("cpu", "cuda"):
        problem = f"ranks on CUDA devices, or to test and to debug on CPUs; the model is on {world.device}"
    elif world.device.type == "cuda" and on_amd():
        problem = "GPUs of NVIDIA, for whose clock and memory its kernels are written, and this torch is for AMD's"
    if problem:
        raise ValueError(f'hecate.compile: transport="symmetric" needs {problem}. Use transport="collectives"')


def _no_room(what: str, excess: list[int], own: list[int], percent: int) -> str:
    rank = int(np.argmax(excess))
    room = own[rank] * percent // 100
    wanted = [(rows, rows * percent // 100 + more) for rows, more in zip(own, excess, strict=True) if more]
    if all(rows for rows, _ in wanted):
        # The percentage is rounded up, with two places.
        enough = max(-(-100 * all_rows // rows) for rows, all_rows in wanted)
        advice = (
            f"Config(capacity={enough / 100:g}) would have been enough; with as many tokens on every rank, capacity="
            f'{len(own)} always is. transport="collectives" needs no bound'
        )
    else:
        advice = (
            "A rank without rows of its own has no room, whatever the capacity: give it some, or use "
            'Config(transport="collectives"), which needs no bound'
        )
    return (
        f"hecate: {what}: {room + excess[rank]} rows would come to rank {rank}, which has room for {room}, "
        f"{percent / 100:g} times the {own[rank]} that it has itself. No rows travelled, and all that was computed "
        "from them is NaN: clear the gradients and make the step again. If something has updated parameters with "
        f"them all the same, such as an optimizer whose step is compiled, load a checkpoint. {advice}"
    )


def _lands_as(dtype: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are written: no kernel casts float64."""
    return dtype if dtype in FLOATS else wire
