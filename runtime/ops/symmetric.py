"""Exchanges in which the host never learns how many rows go where: one-sided, with a bound of the rows that come.

With ``Config(transport="symmetric")`` counts, rows, replicas and their gradients (``one_sided_experts``) travel over
:class:`~hecate.runtime.ops.one_sided.Transport`. Counts stay on the device, and tickets are made there
(``device_dispatch``). A rank that has R rows has room for so many percent of R, so every shape is known before
anything has run. What comes lies in the front of that room; behind it zeros are written, and nowhere else.

**The host learns late.** Counts, and whether there was room, are copied to the host while it goes on, and read at
:meth:`Symmetric.settle`: when the next forward begins, before an optimizer steps or a scaler looks at gradients, when
statistics or a checkpoint ask, and at the end of a forward without gradients. There all ranks are at the same place,
and read the same. If the device is still at it then, the host waits for that copy alone, which lies in the forward.

**More rows than there is room for.** Nothing of such an exchange travels, on no rank. What each gets instead is NaN,
so no loss and no gradient of that step can pass for a right one, and ``settle`` raises before an optimizer takes
them: nothing is lost, and the step can be made again. An optimizer whose step is compiled does not ask, nor does who
updates parameters by hand: there the next forward raises. Not taken: a fallback to collectives for such a step, which
would need a second graph, since shapes are fixed in this one.

**Ranks that do not come.** Where the host waits, it raises at once, with what is known of them. Where kernels wait,
what comes out is NaN as well, and the host learns of it as of all else; statistics and checkpoints ask for all of it.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.comm.supervise import begin, supervised_waits
from hecate.runtime.comm.waiting import timeout_of
from hecate.runtime.comm.windows import shared_windows, symmetric_windows
from hecate.runtime.comm.world import World
from hecate.runtime.kernels.clear_rows import clear_rows_behind
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.launch import runs_on
from hecate.runtime.kernels.links import Rows
from hecate.runtime.kernels.operands import FLOATS, flat_rows
from hecate.runtime.ops.device_dispatch import BoundedTicket, bounded_ticket
from hecate.runtime.ops.device_tables import Fixed, LayerTables
from hecate.runtime.ops.one_sided import ExchangeFailed, Transport
from hecate.runtime.placement.placement import Placement
from hecate.runtime.state.layer import Layer

# Bytes of a chunk of a link; a rank's window has two for each rank. On a GPU, where each chunk costs launches, of all
# links together: the more ranks there are, the fewer rows go to each. With this, 65,536 rows of 4 KB and room for
# twice as many take 6 chunks among 8 ranks, as all of them may go over one link. Not tuned.
_SEGMENT, _SEGMENTS = 2**20, 3 * 2**28
# The part of a group's timeout after which a kernel gives up. Behind one that waits stand other collectives, whose
# watchdog would end the process and could not say who was late.
_PATIENCE = 0.9
# Most bytes of the pieces that an expert travels in: it is megabytes, and kernels take rows of some thousand numbers.
_PIECE = 2**14


@dataclass(eq=False)
class _Unread:
    """Numbers on their way to the host, behind the transport's faults, and who is told them."""

    message: Tensor
    shape: torch.Size
    there: Any
    tell: Callable[[Tensor], None]


@dataclass(eq=False)
class Symmetric:
    """What all layers of a model exchange rows and replicas with.

    Attributes:
        percent: for so many percent of the rows that a rank has it has room.
        fixed: while launches are recorded, what they read in place of the placements that graphs carry.
    """

    world: World
    transport: Transport
    percent: int
    fixed: Fixed | None = field(default=None, repr=False)
    _unread: list[_Unread] = field(default_factory=list, repr=False)
    _tables: dict[int, tuple[Placement, LayerTables]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _living[next(_numbers)] = self

    @classmethod
    def between(cls, world: World, percent: int) -> Symmetric:
        """Over memory that the ranks of ``world`` share. A collective.

        Raises:
            RuntimeError: they cannot share it.
        """
        assert world.group is not None, "one rank has nobody to send rows to"
        seconds = timeout_of(world.group) * (1.0 if _host_waits(world.device) else _PATIENCE)
        if world.device.type == "cpu":
            return cls(world, Transport(shared_windows(world, _SEGMENT), seconds=seconds), percent)
        transport = Transport(symmetric_windows(world, segment_on_gpu(world.size)), seconds=seconds)
        # What it keeps was made on the stream of the compute, and exchanges run on another.
        torch.cuda.synchronize(world.device)
        return cls(world, transport, percent)

    def tables_of(self, placement: Placement, layer: Layer) -> LayerTables:
        """A placement on the device; the last one of each layer is kept."""
        if self.fixed is not None:
            return self.fixed.layers[layer.id].tables
        known = self._tables.get(layer.id)
        if known is None or known[0] != placement:
            tables = LayerTables.from_placement(placement, layer).on(self.world.device)
            known = self._tables[layer.id] = placement, tables
        return known[1]

    def exchange(
        self,
        leaving: Rows,
        sends: Tensor,
        arriving: Rows,
        *,
        most: int,
        wire: torch.dtype,
        expects: Tensor,
        excess: Tensor | None = None,
    ) -> None:
        """All :meth:`Transport.steps`. What comes fills the front of ``arriving``, and behind it are zeros.

        If rows did not come it raises. Where the host does not wait, all is NaN then, and 0 in whole numbers.

        Args:
            excess: rows for which each rank has no room, int64 ``[W]``. If there are any, all is NaN as well.
        """
        group, rows = self.world.group, arriving.tensor
        steps = partial(self.transport.steps, leaving, sends, arriving, most=most, wire=wire, expects=expects)
        if group is not None:
            # As one row of it: ranks need not have as many.
            begin("one_sided", rows.new_empty((), dtype=wire).expand(rows.shape[1:]), group)
        if not _host_waits(self.world.device):
            _walk(steps())
        elif group is None:
            _walk(steps())
            self.transport.check()
        else:
            with supervised_waits(group) as stop:
                _walk(steps(stop=stop))
                self.transport.check()
        faults = self.transport.faults
        lost = (faults if excess is None else torch.cat([faults, excess.unsqueeze(0)])).any()
        clear_rows_behind(flat_rows(rows), expects.sum(0, keepdim=True), lost)

    def carry(self, experts: Tensor, sends: Tensor, receives: Tensor, *, room: int, most: int) -> Tensor:
        """Experts from rank to rank, in pieces: ``[n, width] -> [room, width]``, a view; zeros behind what comes.

        Args:
            experts: rank by rank, and perhaps others behind those that leave.
            sends, receives: how many leave for each rank, and come from each, int64 ``[W]`` on the device.
            most: experts that no link has more of.
        """
        width = experts.shape[1]
        piece = piece_of(width, experts.dtype, self.transport.windows.segment)
        pieces = -(-width // piece)
        rest = pieces * piece - width
        padded = (torch.nn.functional.pad(experts, (0, rest)) if rest else experts).contiguous()
        leaving = Rows(padded.view(len(experts) * pieces, piece))
        arriving = padded.new_empty((room * pieces, piece))
        self.exchange(
            leaving, sends * pieces, Rows(arriving), most=most * pieces, wire=experts.dtype, expects=receives * pieces
        )
        return arriving.view(room, pieces * piece)[:, :width]

    def signature(self, plans: int) -> Tensor:
        """What travels with counts, int64 ``[3]`` on the device: a digest of plans, and proof of all collectives."""
        if self.fixed is not None:
            return self.fixed.signature
        numbers = np.array([plans, *collectives.proof(self.world)], dtype=np.int64)
        return collectives.on_device(numbers, self.world.device)

    # --- what the host learns ---

    def tell_later(self, numbers: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Copy int64 ``numbers`` to the host, which does not wait, and call ``tell`` with them at the next settle."""
        message = torch.cat([self.transport.faults.flatten(), numbers.flatten()])
        there: Any = None
        copy = collectives.on_host(message)
        if message.is_cuda:
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(message.device))
        self._unread.append(_Unread(copy, numbers.shape, there, tell))

    def take_unread(self) -> list[_Unread]:
        """What a recorded forward would tell the host; :meth:`tell_again` for each time that it is replayed."""
        unread, self._unread = self._unread, []
        return unread

    def tell_again(self, unread: list[_Unread], there: Any) -> None:
        """The same numbers are on their way once more.

        Args:
            there: an event behind them, or None where they have come.
        """
        self._unread = [replace(one, there=there) for one in unread]

    def settle(self, *, whole: bool = False) -> None:
        """Let the host learn what it was to be told.

        Args:
            whole: and whether ranks came to the exchanges since, in the last backward, for which this waits.

        Raises:
            ExchangeFailed: there was no room for some rows, on all ranks; or rows did not come. What came behind that
                is forgotten: it was computed from NaN.
            DisagreementError: ranks have different plans, or have exchanged different things.
        """
        unread, self._unread = self._unread, []
        faults = self.transport.faults
        for one in unread:
            if one.there is not None:
                one.there.synchronize()
            self.transport.check(one.message[: faults.numel()].view(faults.shape))
            one.tell(one.message[faults.numel() :].view(one.shape))
        if whole:
            self.transport.check()

    def forget(self) -> None:
        """What the host was to be told is of no interest any more."""
        self._unread.clear()


def segment_on_gpu(ranks: int) -> int:
    """Bytes of a chunk of each of so many links."""
    return max(_SEGMENT, _SEGMENTS // ranks)


def piece_of(width: int, dtype: torch.dtype, segment: int) -> int:
    """Numbers of ``dtype`` in the pieces that an expert of ``width`` travels in, of ``segment`` bytes at most.

    >>> piece_of(3 * 2048 * 768, torch.bfloat16, 2**22), piece_of(10_007, torch.float32, 2**20)
    (8192, 3336)

    The most that make up a whole expert, if that is not few; else about as many in each, and the last is not full.
    Pieces begin at multiples of 16 bytes, which is what kernels load at once.
    """
    most, step = max(1, min(_PIECE, segment) // dtype.itemsize), max(1, 16 // dtype.itemsize)
    if width <= most:
        return max(1, width)
    even = -(-width // -(-width // most))
    whole = (piece for piece in range(most - most % step, most // 4, -step) if width % piece == 0)
    return next(whole, -(-even // step) * step)


def _walk(steps: Iterator[object]) -> None:
    """Do all of them."""
    for _ in steps:
        pass


def _host_waits(device: torch.device) -> bool:
    """Whether the host waits for other ranks in an exchange; else kernels do, and the host goes on."""
    return device.type != "cuda" or not runs_on(device)


# In the order in which models were compiled, which is the same on all ranks.
_living: weakref.WeakValueDictionary[int, Symmetric] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def settle_all() -> None:
    """:meth:`Symmetric.settle` of every model: an optimizer does not say whose parameters it has."""
    for number in sorted(_living):
        one = _living.get(number)
        if one is None:
            continue
        try:
            one.settle()
        except ExchangeFailed as error:
            # A model that is gone lives on as garbage, on some ranks and not on others: nobody is told of it.
            alive = weakref.ref(one)
            del one
            error.__traceback__ = None
            gc.collect()
            if alive() is not None:
                raise


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
        message = torch.cat([counts, symmetric.signature(plans)])
        leaving = message.expand(size, -1).contiguous()
        out = torch.empty_like(leaving)
        one = torch.ones(size, dtype=torch.int64, device=counts.device)
        symmetric.exchange(Rows(leaving), one, Rows(out), most=1, wire=torch.int64, expects=one)
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
    symmetric: Symmetric = record.symmetric
    ticket = bounded_ticket(counts, symmetric.tables_of(placement, record).rows, rows=rows, percent=percent)
    # A copy: a graph may use the memory of its values again.
    record.arrived = ticket.splits[1].clone()

    def tell(numbers: Tensor) -> None:
        excess, own = numbers.tolist()
        if any(excess):
            raise ExchangeFailed(_no_room(record.placer.label("rows"), excess, own, percent))

    symmetric.tell_later(torch.stack([ticket.splits[2], counts.sum(1)]), tell)
    return ticket


def _no_room(what: str, excess: list[int], own: list[int], percent: int) -> str:
    rank = int(np.argmax(excess))
    room = own[rank] * percent // 100
    wanted = [(rows, rows * percent // 100 + more) for rows, more in zip(own, excess, strict=True) if more]
    if all(rows for rows, _ in wanted):
        # Rounded up, with two places.
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


def exchange(record: Layer, rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor) -> Job:
    """Rows to the experts' holders: ``[R, ...] -> [room, ...]``, zeros behind those that come."""
    symmetric: Symmetric = record.symmetric
    dtype, wire, shape = rows.dtype, record.wire_of(rows), rows.shape[1:]
    leaving, parts, order = gather_rows(rows, send_index, wire), splits.clone(), receive_index.clone()
    record.count_rows_later(rows, parts[0])
    most = max(leaving.shape[0], order.shape[0])
    out = rows.new_empty((order.shape[0], *shape), dtype=_lands_as(dtype, wire))

    def run() -> Tensor:
        symmetric.exchange(
            Rows(leaving), parts[0], Rows(out, order, by_row=True), most=most, wire=wire, expects=parts[1],
            excess=parts[2],
        )  # fmt: skip
        return out.to(dtype)

    return Job(record.world.queue, run, label=record.placer.label("exchange"))


def exchange_back(
    record: Layer, rows: Tensor, splits: Tensor, send_index: Tensor, receive_index: Tensor, num_rows: int
) -> Job:
    """Results to where the rows came from: ``[room, ...] -> [R, ...]``, zeros behind the rows that were sent."""
    symmetric: Symmetric = record.symmetric
    dtype, wire, shape = rows.dtype, record.wire_of(rows), rows.shape[1:]
    parts, order = splits.clone(), send_index.clone()
    here = Rows(rows, receive_index, by_row=True).by_place().index
    assert here is not None
    leaving = gather_rows(rows, here, wire, used=parts[1].sum(0, keepdim=True))
    record.count_rows_later(rows, parts[1])
    most = max(leaving.shape[0], num_rows)
    out = rows.new_empty((num_rows, *shape), dtype=_lands_as(dtype, wire))

    def run() -> Tensor:
        symmetric.exchange(
            Rows(leaving), parts[1], Rows(out, order), most=most, wire=wire, expects=parts[0],
            excess=parts[2],
        )  # fmt: skip
        return out.to(dtype)

    # Plans are made when the next forward takes them: until then the host does not know the counts.
    return Job(record.world.queue, run, label=record.placer.label("exchange_back"))


def _lands_as(dtype: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """What rows of ``dtype`` are written as: no kernel casts float64."""
    return dtype if dtype in FLOATS else wire
