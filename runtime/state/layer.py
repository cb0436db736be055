"""The runtime record of one MoE layer, found by a number that is baked into graphs.

A graph must not hold ownership, placement, rank or counts, or every change of them would be a
recompile. It holds the number, and the operators look the rest up here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner import LayerSizes
from hecate.runtime.state.layer_plan import LayerPlacer
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.registry import Registry


@dataclass(eq=False)
class Layer:
    """One experts module: who owns its experts, and what its last step carried.

    Attributes:
        id: the number in the graph. The same on every rank, since all ranks compile the same models
            in the same order (``hecate.compile`` compares them).
        name: qualified name of the experts module.
        placer: decides who holds what.
        dtype: what its experts compute in.
        wire_dtype: what wider rows travel in; None for their own.
        symmetric: carries rows and replicas one-sided (``hecate.runtime.ops.symmetric``); None where collectives do.
        counts: rows that each rank routed to each expert in the last step, int64 ``[W, E]`` on the CPU
            (at one rank, or one-sided, it may still be on the device); None before the first step.
        unread: of exchanges whose sizes only the device knows, bytes of a row and rows to each rank.
        arrived: rows from each rank in the last step, where only the device knows; see :meth:`read_rows`.
        rows: rows that this rank computed in the last step.
        replicas: expert copies that travelled in the last step, over all ranks.
        bytes_sent: rows that this rank sent to others in the last step, forward and backward.
        node_bytes_sent: those of them that it sent to other nodes.
        expert_bytes_sent: experts and gradients that it sent to others in the last step.
    """

    id: int
    name: str
    world: World
    placer: LayerPlacer
    dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype | None = None
    # Of a room above this one.
    symmetric: Any = field(default=None, repr=False)
    counts: torch.Tensor | None = field(default=None, repr=False)
    unread: list[tuple[int, torch.Tensor]] = field(default_factory=list, repr=False)
    arrived: torch.Tensor | None = field(default=None, repr=False)
    rows: int = 0
    replicas: int = 0
    bytes_sent: int = 0
    node_bytes_sent: int = 0
    expert_bytes_sent: int = 0

    @property
    def owners(self) -> Owners:
        """Who owns its experts now."""
        return self.placer.owners

    @property
    def num_experts(self) -> int:
        return self.owners.num_experts

    @property
    def sizes(self) -> LayerSizes:
        """What one of its experts weighs on the wire, and what a row weighs and computes."""
        return self.placer.sizes

    def planning(self, *, homeward: bool) -> Callable[[], None] | None:
        """Plans the next step, unless it is planned: what the host does beside an exchange of rows.

        Beside the one to experts. A GPU's host has their kernels to launch then, so it plans beside the one home. If
        it launches the collectives, too, it is layers ahead in a backward, and plans there what can wait.
        """
        now = homeward == (self.world.device.type != "cpu")
        if self.world.queue.on_stream and self.placer.can_wait_for_backward:
            now = torch._C._current_graph_task_id() != -1
        return self.placer.plan_ahead if now else None

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """What rows of ``dtype`` travel in."""
        wire = self.wire_dtype
        narrower = wire is not None and dtype.is_floating_point and wire.itemsize < dtype.itemsize
        return wire if wire is not None and narrower else dtype

    def wire_of(self, rows: torch.Tensor) -> torch.dtype:
        """What ``rows`` ``[R, ...]`` travel in. One value a row, a routing weight, is not worth rounding."""
        return self.travels_as(rows.dtype) if rows.shape[1:].numel() > 1 else rows.dtype

    def count_rows_sent(self, rows: torch.Tensor, *hops: list[int]) -> None:
        """Rows like those of ``rows`` ``[R, ...]`` travel.

        Args:
            hops: how many of them to each rank, length W, each time that they are sent.
        """
        row_bytes = self._bytes_of_row(rows)
        for send in hops:
            self._add_sent(row_bytes, send)

    def count_rows_later(self, rows: torch.Tensor, send: torch.Tensor) -> None:
        """The same, where only the device knows how many rows go to each rank, int64 ``[W]``."""
        self.unread.append((self._bytes_of_row(rows), send))

    def read_rows(self) -> None:
        """Take in what only the device knew. Waits for it, if there is something."""
        unread, self.unread = self.unread, []
        for row_bytes, send in unread:
            self._add_sent(row_bytes, send.tolist())
        if self.arrived is not None:
            self.rows, self.arrived = int(self.arrived.sum()), None

    def _bytes_of_row(self, rows: torch.Tensor) -> int:
        """As it travels. The size of a row is known from the first exchange on."""
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


LAYERS: Registry[Layer] = Registry("MoE layer")


def add_layer(*, name: str, owners: Owners, world: World, placer: Placer | None = None) -> Layer:
    """Create a record with the next free number; without a placer, nothing is replicated."""
    model = placer if placer is not None else Placer.static(world)
    return LAYERS.add(
        lambda id: Layer(id=id, name=name, world=world, placer=LayerPlacer(model, id=id, name=name, owners=owners))
    )


def get_layer(id: int) -> Layer:
    """The record of ``id``."""
    return LAYERS[id]
