"""Runtime records of MoE layers, each found by a number that is baked into graphs.

A layer holds a :class:`Carrier`, the seam between operators (``hecate.runtime.ops``) and transports. No caller asks
which carrier it is: facts that others must know are attributes. ``hecate.wrap.shard_model`` has the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hecate.private import in_backward
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import LayerSizes
from hecate.runtime.state.layer_plan import LayerPlacer
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.registry import Registry


@dataclass(eq=False)
class Layer:
    """The record of an experts module: its owners, and what its last step carried."""

    # The number in the graph: the same on every rank, since all compile the same models in the same order.
    id: int
    name: str  # qualified name of the experts module
    world: World
    placer: LayerPlacer
    carrier: Carrier = field(repr=False)
    dtype: torch.dtype = torch.float32  # that of its experts' compute
    wire_dtype: torch.dtype | None = None  # the dtype in which wider rows travel; None for their own
    choices: HeldChoices | None = field(default=None, repr=False)  # of the forward that runs, where they are held
    # Rows that each rank routed to each expert in the last step, int64 ``[W, E]`` on the CPU or where counts stay; at
    # one rank where each expert's rows end, ``[E]`` on the device. None before the first step.
    counted: torch.Tensor | None = field(default=None, repr=False)
    # Of exchanges whose sizes only the device knows, bytes of a row and rows to each rank.
    unread: list[tuple[int, torch.Tensor]] = field(default_factory=list, repr=False)
    # Rows from each rank in the last step, where only the device knows; see :meth:`read_rows`.
    arrived: torch.Tensor | None = field(default=None, repr=False)
    # Of the last step: rows that this rank computed, expert copies that travelled over all ranks, bytes of rows that
    # this rank sent to others and of those to other nodes, forward and backward, and bytes of experts and gradients.
    rows: int = 0
    replicas: int = 0
    bytes_sent: int = 0
    node_bytes_sent: int = 0
    expert_bytes_sent: int = 0

    @property
    def owners(self) -> Owners:
        return self.placer.owners

    @property
    def num_experts(self) -> int:
        return self.owners.num_experts

    @property
    def counts(self) -> torch.Tensor | None:
        """Rows that each rank routed to each expert in the last step, ``[W, E]``, where :attr:`counted` is."""
        ends = self.counted
        return ends if ends is None or ends.dim() == 2 else torch.diff(ends, prepend=ends.new_zeros(1)).unsqueeze(0)

    def without_rows(self) -> set[int]:
        """Return the experts for which no rank of any group had a row in the last step; a collective of groups."""
        counts, world = self.counts, self.world
        assert counts is not None, "rows were counted"
        rows = counts.sum(0)
        if world.everyone is not world:
            rows = rows.to(world.everyone.control_device)
            # What graphs have started must not mix with this.
            world.everyone.queue.drain()
            collectives.all_reduce(rows, world.everyone)
        return {*(rows == 0).nonzero().flatten().tolist()}

    @property
    def sizes(self) -> LayerSizes:
        """Bytes of an expert and of a row in a collective, and the operations of a row."""
        return self.placer.sizes

    def job(self, operator: str, run: Callable[[], Any], **how: Any) -> Job:
        """Return a collective of the layer's latest forward that does ``run``; ``how`` are other fields of a job."""
        return Job(self.world.queue, run, label=self.placer.label(operator), **how)

    def planning(self, *, homeward: bool) -> Callable[[], None] | None:
        """Return the host's work during an exchange, to plan the next step; None if it plans in another one.

        On a CPU the host plans during the exchange to experts. A GPU's host has their kernels to launch then, so it
        plans during the one back. If it launches the collectives, too, it is layers ahead in a backward, and plans
        there whatever can wait.
        """
        now = homeward == (self.world.device.type != "cpu")
        if self.world.queue.on_stream and self.placer.can_wait_for_backward:
            now = in_backward()
        return self.placer.plan_ahead if now else None

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        wire = self.wire_dtype
        narrower = wire is not None and dtype.is_floating_point and wire.itemsize < dtype.itemsize
        return wire if wire is not None and narrower else dtype

    def wire_of(self, rows: torch.Tensor) -> torch.dtype:
        """Return the dtype in which ``rows`` ``[R, ...]`` travel; rows of one value (routing weights) stay exact."""
        return self.travels_as(rows.dtype) if rows.shape[1:].numel() > 1 else rows.dtype

    def count_rows_sent(self, rows: torch.Tensor, *hops: list[int]) -> None:
        """Count rows like those of ``rows`` ``[R, ...]`` as sent, in each hop so many to each rank, length W."""
        row_bytes = self._bytes_of_row(rows)
        for send in hops:
            self._add_sent(row_bytes, send)

    def count_rows_later(self, rows: torch.Tensor, send: torch.Tensor) -> None:
        """Count rows as sent where only the device knows how many go to each rank, int64 ``[W]``."""
        self.unread.append((self._bytes_of_row(rows), send))

    def read_rows(self) -> None:
        """Read counts of rows that only the device knew, and wait for it if there are any."""
        unread, self.unread = self.unread, []
        for row_bytes, send in unread:
            self._add_sent(row_bytes, send.tolist())
        if self.arrived is not None:
            self.rows, self.arrived = int(self.arrived.sum()), None

    def _bytes_of_row(self, rows: torch.Tensor) -> int:
        """Return the bytes of a row as it travels, and note them in the layer's sizes from the first exchange on."""
        width = rows.shape[1:].numel()
        row_bytes = width * self.wire_of(rows).itemsize
        if width > 1 and self.sizes.row_bytes != row_bytes:
            self.placer.sizes = replace(self.sizes, row_bytes=row_bytes)
        return row_bytes

    def _add_sent(self, row_bytes: int, send: list[int]) -> None:
        topology, rank, total = self.placer.model.topology, self.world.rank, sum(send)
        self.bytes_sent += row_bytes * (total - send[rank])
        here = sum([send[neighbour] for neighbour in topology.members[topology.node_of[rank]]])
        self.node_bytes_sent += row_bytes * (total - here)


@dataclass(frozen=True)
class ChoicePart:
    """A part of a router's choice in one forward.

    Attributes:
        first: how many experts of a token it has chosen before, in other operations.
        count: how many it chooses here.
        total: all that it chooses for a token.
        differ: no expert may come twice for a token.
        call: how often the layer was called before.
    """

    first: int
    count: int
    total: int
    differ: bool
    call: int


class HeldChoices(Protocol):
    """What a layer's router chooses in one forward, as something outside of the model keeps or decides it."""

    def __call__(self, ids: Tensor, part: ChoicePart) -> Tensor:
        """Take note of experts that the router has chosen, and return those that tokens go to.

        Args:
            ids: integers ``[..., count]``, or ``[...]`` if ``count`` is one.
        """


# A ticket: split sizes int64 ``[n, W]``, where each row leaves to, and where each arrives. In a ticket by nodes (see
# :class:`Relaying`) the rows that are passed on stand before the last.
Ticket = Sequence[Tensor]


class Carrier(Protocol):
    """Carries rows and experts of the layers of a model between ranks.

    A method packs the tensors that it sends before it returns its :class:`Job`, whose result is what was received.
    All ranks call the same methods in the same order.
    """

    @property
    def room_percent(self) -> int:
        """Percentage of its own rows for which a rank has room, whatever it is sent; 0 where room is unbounded."""

    @property
    def counts_stay(self) -> bool:
        """Tell whether counts of rows stay on the device, so that the host learns of them at :meth:`settle`."""

    def place(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Take this step's placement: int8 ``[E, W]``, and the experts of this rank's replicas, int64 ``[K]``."""

    def gather_counts(self, layer: Layer, counts: Tensor) -> Job:
        """Gather the rows of every rank for every expert: int64 ``[E] -> [W, E]``."""

    def route(
        self, layer: Layer, counts: Tensor, placement: Placement, like: Tensor, *, rows: int, chunks: int
    ) -> list[Tensor]:
        """Decide which rank computes which rows.

        Args:
            counts: of all ranks, ``[W, E]``, as :meth:`gather_counts` has them.
            like: a tensor on the device where tickets are needed.
            rows: how many this rank has; 0 where no room is bounded by it.

        Returns:
            For each chunk the ends of the slots, int32 ``[S]``, and the three tensors of its ticket.
        """

    def ticket_like(self, counts: Tensor, like: Tensor, *, rows: int) -> list[Tensor]:
        """Return a ticket of the sizes that :meth:`route` gives it, for tracing."""

    def dispatch(self, layer: Layer, rows: Tensor, ticket: Ticket) -> Job:
        """Bring rows to the ranks that hold their experts: ``[R, ...] -> [R', ...]``."""

    def combine(self, layer: Layer, rows: Tensor, ticket: Ticket, num_rows: int) -> Job:
        """Return results to their rows' ranks: ``[R', ...] -> [num_rows, ...]``, zeros for rows never sent."""

    def gather_replicas(self, layer: Layer, shards: Sequence[Tensor], placement: Placement) -> Job:
        """Fill a rank's replicas (SparseAllGather): ``[E_r, ...] -> [K, ...]`` of each tensor."""

    def reduce_replicas(
        self, layer: Layer, own: Sequence[Tensor], replicas: Sequence[Tensor], placement: Placement
    ) -> Job:
        """Bring the mean over ranks of the slots' gradients to the owners (SparseReduceScatter).

        ``[E_r, ...], [K, ...] -> [E_r, ...]`` of each tensor.
        """

    def settle(self, *, whole: bool = False) -> None:
        """Let the host learn what the device alone knows of the last forward. A collective.

        Args:
            whole: of its backward, too; waits for the device.

        Raises:
            ExchangeFailed: on all ranks.
            DisagreementError: ranks have different plans, or have exchanged different things.
        """

    def forget(self) -> None:
        """Forget what the host was still to learn: the forward is undone."""

    def replays(self, placer: Placer) -> Replays:
        """Return the state that changes between replays of launches recorded once, for all layers of a model."""


@runtime_checkable
class Relaying(Carrier, Protocol):
    """A carrier that can bring a token's row to each node once, where it gets a ticket that says so."""

    def route_nodes(self, layer: Layer, tokens: Tensor, counts: Tensor, placement: Placement, ticket: Ticket) -> Job:
        """Make the ticket by nodes of the rows of a ``ticket`` that :meth:`route` made.

        Args:
            tokens: which token each row is of, integers ``[R]``.

        Returns:
            Its result is rows to and from each rank in both hops, int64 ``[4, W]`` on the CPU, and the three indexes
            by which rows leave, are passed on, and arrive.
        """


class Replays:
    """State that recorded launches read and that differs from replay to replay.

    Here there is none, as at one rank: no placement changes, and nothing is told to the host.
    """

    def prepare(self, placements: Mapping[Layer, Placement]) -> None:
        """Make room for these placements, and more, before launches are recorded."""

    def forget(self) -> None:
        """Forget all recorded launches."""

    def have_room(self, placements: Mapping[Layer, Placement]) -> bool:
        """Tell whether recorded launches can follow these placements; the answer is the same on all ranks."""
        return True

    def write(self, placements: Mapping[Layer, Placement]) -> None:
        """Let launches from now on follow these placements."""

    def recording(self) -> AbstractContextManager[None]:
        """Let operators inside the block read and write the state of recorded launches."""
        return nullcontext()

    def recorded(self) -> None:
        """Remember what a forward that was recorded would tell the host."""

    def tell_again(self, forward_ends: object) -> None:
        """Tell the host the same after a replay, when the event ``forward_ends`` has come."""


LAYERS: Registry[Layer] = Registry("MoE layer")


def add_layer(*, name: str, owners: Owners, world: World, carrier: Carrier, placer: Placer | None = None) -> Layer:
    """Create a record with the next free number; without a placer, nothing is replicated."""
    model = placer if placer is not None else Placer.static(world)
    return LAYERS.add(
        lambda id: Layer(
            id=id,
            name=name,
            world=world,
            carrier=carrier,
            placer=LayerPlacer(model, id=id, name=name, owners=owners),
        )
    )


def get_layer(id: int) -> Layer:
    """Return the record of ``id``."""
    return LAYERS[id]
