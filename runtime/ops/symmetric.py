"""Exchanges in which the host never learns how many rows go where: one-sided, with a bound of the rows that come.

With ``Config(transport="symmetric")`` counts and rows travel over :class:`~hecate.runtime.ops.one_sided.Transport`.
Counts stay on the device, and tickets are made there (``device_dispatch``). A rank that has R rows has room for so
many percent of R, so every shape is known before anything has run. What comes lies in the front of that room, and
behind it are zeros.

**The host learns late.** Counts, and whether there was room, are copied to the host while it goes on, and read at
:meth:`Symmetric.settle`: when the next forward begins, before an optimizer steps, when statistics or a checkpoint
ask, and at the end of a forward without gradients. There all ranks are at the same place, and read the same. If the
device is still at it then, the host waits for that copy alone, which lies in the forward.

**More rows than there is room for.** Nothing of such an exchange travels, on no rank. What each gets instead is NaN,
so no loss and no gradient of that step can pass for a right one, and ``settle`` raises before an optimizer takes
them: nothing is lost, and the step can be made again. Not taken: a fallback to collectives for such a step, which
would need a second graph, since shapes are fixed in this one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.comm.waiting import timeout_of
from hecate.runtime.comm.windows import shared_windows, symmetric_windows
from hecate.runtime.comm.world import World
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.links import Rows
from hecate.runtime.kernels.wait_words import LONGEST_PAUSE
from hecate.runtime.ops.device_dispatch import BoundedTicket, DeviceTables, bounded_ticket
from hecate.runtime.ops.one_sided import POLLS, ExchangeFailed, Transport
from hecate.runtime.placement.placement import Placement
from hecate.runtime.state.layer import Layer

# Bytes of a chunk of a link. A rank's window has two for each rank. Not tuned.
_SEGMENT = {"cpu": 2**20, "cuda": 2**22}


@dataclass(eq=False)
class _Unread:
    """Numbers on their way to the host, and who is told them."""

    numbers: Tensor
    there: Any
    tell: Callable[[Tensor], None]


@dataclass(eq=False)
class Symmetric:
    """What all layers of a model exchange rows with.

    Attributes:
        percent: for so many percent of the rows that a rank has it has room.
    """

    world: World
    transport: Transport
    percent: int
    _unread: list[_Unread] = field(default_factory=list, repr=False)
    _tables: dict[int, tuple[Placement, DeviceTables]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _living[next(_numbers)] = self

    @classmethod
    def between(cls, world: World, percent: int) -> Symmetric:
        """Over memory that the ranks of ``world`` share. A collective.

        Raises:
            RuntimeError: they cannot share it.
        """
        assert world.group is not None, "one rank has nobody to send rows to"
        segment = _SEGMENT[world.device.type]
        if world.device.type == "cpu":
            polls = int(timeout_of(world.group) / LONGEST_PAUSE)
            return cls(world, Transport(shared_windows(world, segment), polls=polls), percent)
        transport = Transport(symmetric_windows(world.group, segment, world.device), polls=POLLS)
        # What it keeps was made on the stream of the compute, and exchanges run on another.
        torch.cuda.synchronize(world.device)
        return cls(world, transport, percent)

    def tables_of(self, placement: Placement, layer: Layer) -> DeviceTables:
        """A placement on the device; the last one of each layer is kept."""
        known = self._tables.get(layer.id)
        if known is None or known[0] != placement:
            known = self._tables[layer.id] = placement, _tables(placement, layer, self.world.device)
        return known[1]

    def exchange(self, leaving: Rows, sends: Tensor, arriving: Rows, *, most: int, wire: torch.dtype) -> None:
        """:meth:`Transport.exchange`; on a CPU, where that costs nothing, it raises at once if rows did not come."""
        self.transport.exchange(leaving, sends, arriving, most=most, wire=wire)
        if self.world.device.type == "cpu":
            self.transport.check()

    # --- what the host learns ---

    def tell_later(self, numbers: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Copy ``numbers`` to the host, which does not wait, and call ``tell`` with them at the next settle."""
        if not numbers.is_cuda:
            self._unread.append(_Unread(numbers.clone(), None, tell))
            return
        there: Any = torch.cuda.Event()
        copy = collectives.on_host(numbers)
        there.record(torch.cuda.current_stream(numbers.device))
        self._unread.append(_Unread(copy, there, tell))

    def settle(self) -> None:
        """Let the host learn what it was to be told.

        Raises:
            ExchangeFailed: there was no room for some rows, on all ranks; or rows did not come. What came behind that
                is forgotten: it was computed from NaN.
        """
        unread, self._unread = self._unread, []
        for one in unread:
            if one.there is not None:
                one.there.synchronize()
            one.tell(one.numbers)


# In the order in which models were compiled, which is the same on all ranks.
_living: weakref.WeakValueDictionary[int, Symmetric] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def settle_all() -> None:
    """:meth:`Symmetric.settle` of every model: an optimizer does not say whose parameters it has."""
    for _, symmetric in sorted(_living.items()):
        symmetric.settle()


def _tables(placement: Placement, layer: Layer, device: torch.device) -> DeviceTables:
    return DeviceTables.from_placement(placement, layer.placer.model.topology, layer.world.rank, device)


# --- the operators ---


def gather_counts(record: Layer, counts: Tensor) -> Job:
    """Rows of every rank for every expert, on the device; the host is told later.

    Args:
        counts: of this rank, int64 ``[E]``.
    """
    symmetric: Symmetric = record.symmetric
    placer, size = record.placer, record.world.size
    plans, learning = placer.model.signature, placer.model.learning

    def run() -> Tensor:
        signature = np.array([plans, *collectives.proof(record.world)], dtype=np.int64)
        message = torch.cat([counts, collectives.on_device(signature, counts.device)])
        leaving = message.expand(size, -1).contiguous()
        out = torch.empty_like(leaving)
        one = torch.ones(size, dtype=torch.int64, device=counts.device)
        symmetric.exchange(Rows(leaving), one, Rows(out), most=1, wire=torch.int64)
        return out

    def tell(gathered: Tensor) -> None:
        placer.model.check(gathered[:, -3:])
        if learning:
            placer.remember(gathered[:, :-3].numpy())

    def finish(gathered: Tensor) -> Tensor:
        record.counts = gathered[:, :-3].contiguous()
        record.bytes_sent = record.node_bytes_sent = 0
        record.unread.clear()
        symmetric.tell_later(gathered, tell)
        return record.counts.clone()

    return Job(record.world.queue, run, finish=finish, label=placer.label("gather_counts"))


def route(record: Layer, counts: Tensor, placement: Placement, rows: int, percent: int) -> BoundedTicket:
    """Where each of this rank's ``rows`` goes, with room for ``percent`` of them; the host is told later."""
    symmetric: Symmetric | None = record.symmetric
    if symmetric is None:
        return bounded_ticket(counts, _tables(placement, record, counts.device), rows=rows, percent=percent)
    ticket = bounded_ticket(counts, symmetric.tables_of(placement, record), rows=rows, percent=percent)
    # A copy: a graph may use the memory of its values again.
    record.arrived = ticket.splits[1].clone()
    what = record.placer.label("rows")

    def tell(numbers: Tensor) -> None:
        excess, own = numbers[0].tolist(), numbers[1].tolist()
        symmetric.transport.check(numbers[2:])
        if any(excess):
            raise ExchangeFailed(_no_room(what, excess, own, percent))

    # The transport's faults are those of exchanges before this one.
    numbers = [ticket.splits[2:], counts.sum(1).unsqueeze(0), symmetric.transport.faults]
    symmetric.tell_later(torch.cat(numbers), tell)
    return ticket


def _no_room(what: str, excess: list[int], own: list[int], percent: int) -> str:
    rank = int(np.argmax(excess))
    room = own[rank] * percent // 100
    # Rounded up, with two places.
    enough = max(
        -(-100 * (rows * percent // 100 + more) // max(1, rows)) for rows, more in zip(own, excess, strict=True)
    )
    return (
        f"hecate: {what}: {room + excess[rank]} rows would come to rank {rank}, which has room for {room}, "
        f"{percent / 100:g} times the {own[rank]} that it has itself. No rows travelled, all that was computed from "
        "them is NaN, and no optimizer has taken it: clear the gradients and make the step again. "
        f"Config(capacity={enough / 100:g}) would have been enough; with as many tokens on every rank, capacity="
        f'{len(own)} always is. transport="collectives" needs no bound'
    )


def exchange(record: Layer, rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor) -> Job:
    """Rows to the experts' holders: ``[R, ...] -> [room, ...]``, zeros behind those that come."""
    symmetric: Symmetric = record.symmetric
    dtype, wire, shape = rows.dtype, record.wire_of(rows), rows.shape[1:]
    leaving, parts, order = gather_rows(rows, send_index, wire), splits.clone(), receive_index.clone()
    record.count_rows_later(rows, parts[0])
    most = max(leaving.shape[0], order.shape[0])

    def run() -> Tensor:
        out = _room((order.shape[0], *shape), dtype, parts)
        symmetric.exchange(Rows(leaving), parts[0], Rows(out, order, by_row=True), most=most, wire=wire)
        return out

    return Job(record.world.queue, run, label=record.placer.label("exchange"))


def exchange_back(
    record: Layer, rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, num_rows: int
) -> Job:
    """Results to where the rows came from: ``[room, ...] -> [R, ...]``, zeros where no row was sent."""
    symmetric: Symmetric = record.symmetric
    dtype, wire, shape = rows.dtype, record.wire_of(rows), rows.shape[1:]
    leaving = rows.to(wire, copy=True, memory_format=torch.contiguous_format)
    parts, here, order = splits.clone(), receive_index.clone(), send_index.clone()
    record.count_rows_later(rows, parts[1])
    most = max(leaving.shape[0], num_rows)

    def run() -> Tensor:
        out = _room((num_rows, *shape), dtype, parts)
        symmetric.exchange(Rows(leaving, here, by_row=True), parts[1], Rows(out, order), most=most, wire=wire)
        return out

    # Plans are made when the next forward takes them: until then the host does not know the counts.
    return Job(record.world.queue, run, label=record.placer.label("exchange_back"))


def _room(shape: tuple[int, ...], dtype: torch.dtype, splits: Tensor) -> Tensor:
    """What rows are written into: zeros, and NaN if none will come because there is no room for them somewhere."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=splits.device)
    value = torch.where(splits[2].any(), torch.nan, 0.0).to(dtype)
    return value.expand(shape).clone(memory_format=torch.contiguous_format)
