"""Tables of a placement on a rank's device, which one-sided exchanges of rows and of experts read.

Tables with the same :class:`Room` have the same shapes, so that another placement can be written over one, under
kernels launched with its address. What a placement leaves over names no rank, and experts that do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch

from hecate.runtime.comm.collectives import joined, on_device, parts_of
from hecate.runtime.one_sided.device_dispatch import DeviceTables
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Parts
from hecate.runtime.state.layer import Layer

Part = TypeVar("Part", DeviceTables, "ExpertTables")


@dataclass(frozen=True, kw_only=True)
class Room:
    """Lengths of tables, the same on all ranks, which decide for which placements of the same owners they have room.

    They are most replicas of a rank, most that others hold of one rank's experts, and experts that have replicas.
    """

    replicas: int
    leaving: int
    replicated: int

    @classmethod
    def needed(cls, placement: Placement) -> Room:
        """Return the room that ``placement`` needs, and no more."""
        experts, ranks = placement.pairs
        size, owners = placement.owners.world_size, placement.owner_array[experts]
        away = ranks != owners
        return cls(
            replicas=int(np.bincount(ranks[away], minlength=size).max()),
            leaving=int(np.bincount(owners[away], minlength=size).max()),
            replicated=len(np.unique(experts[away])),
        )

    @classmethod
    def generous(cls, placement: Placement) -> Room:
        """Return twice the room that ``placement`` needs, and at least one replica, but no more than can be."""
        need, counts = cls.needed(placement), placement.owners.counts
        replicas = min(2 * max(1, need.replicas), max(1, len(placement.holders) - min(counts)))
        leaving = min(2 * max(1, need.leaving), (len(counts) - 1) * min(replicas, max(counts)))
        return cls(
            replicas=replicas, leaving=max(1, leaving), replicated=min(len(counts) * replicas, len(placement.holders))
        )

    def joined(self, other: Room) -> Room:
        """Return the room for placements for which either has room."""
        return Room(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})

    def holds(self, need: Room) -> bool:
        """Tell whether tables with this room have the room ``need``."""
        return all(getattr(self, field.name) >= getattr(need, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertTables:
    """Tables of the experts that travel to replicas, and of their gradients back, on one node.

    Attributes:
        travels: whether any do, at any rank.
        leave: own experts in the order in which they leave, by rank and expert, int64 ``[L]``.
        sends, receives: how many leave for each rank, and come from each in slot order, int64 ``[W]``.
        summed: own experts that get parts of gradients, ascending, int64 ``[P]``.
        begins, order: their parts, as ``sum_replicas`` takes them: int64 ``[P + 1]`` and ``[L]``.
        rounds: how many parts they have, as it takes them; None where that changes under the tables.
        replicas, most: for how many this rank has room, and experts that no link has more of.
    """

    travels: bool
    leave: torch.Tensor
    sends: torch.Tensor
    receives: torch.Tensor
    summed: torch.Tensor
    begins: torch.Tensor
    order: torch.Tensor
    rounds: tuple[int, ...] | None
    replicas: int
    most: int

    @classmethod
    def from_placement(cls, placement: Placement, layer: Layer, room: Room | None = None) -> ExpertTables:
        """Return the tables on the host."""
        rank = layer.world.rank
        # On one node an expert travels once, straight from its owner.
        travels = layer.placer.travels(placement)
        _, stage = travels.stages
        _, mine = travels.slots
        owned = placement.owners.counts[rank]
        summed = travels.summed if room is None else np.arange(owned)
        _, parts = travels.parts if room is None else (None, Parts.of(mine, summed, owned + len(travels.replicas)))
        # A rank that owns nothing has nothing to leave, not even in places that no rank reads.
        places = len(mine.leave) if room is None else room.leaving if owned else 0
        return cls(
            travels=room is not None or len(stage.experts) > 0,
            leave=torch.from_numpy(_fill(mine.leave, places)),
            sends=torch.from_numpy(np.array(mine.send, dtype=np.int64)),
            receives=torch.from_numpy(np.array(mine.receive, dtype=np.int64)),
            summed=torch.from_numpy(summed),
            begins=torch.from_numpy(parts.begins),
            order=torch.from_numpy(_fill(parts.order, places)),
            rounds=parts.rounds if room is None else None,
            replicas=len(mine.arrive) if room is None else room.replicas,
            most=max(*mine.send, *mine.receive) if room is None else min(room.replicas, room.leaving),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTables:
    """All tables of a placement for one rank."""

    rows: DeviceTables
    experts: ExpertTables

    @classmethod
    def from_placement(cls, placement: Placement, layer: Layer, room: Room | None = None) -> LayerTables:
        """Return the tables of one rank on the host, with more room than the placement takes if ``room`` says so."""
        more = (0, 0) if room is None else (room.replicas, room.replicated)
        rows = DeviceTables.from_placement(
            placement, layer.placer.model.topology, layer.world.rank, _HOST, replicas=more[0], replicated=more[1]
        )
        return cls(rows=rows, experts=ExpertTables.from_placement(placement, layer, room))

    def on(self, device: torch.device) -> LayerTables:
        """Return these tables on ``device``, without waiting for what it does meanwhile."""
        return self.within(on_device(self.joined(), device))

    def joined(self) -> Ints:
        """Return all numbers of tables on the host, behind each other."""
        return joined(self._numbers)

    def within(self, numbers: torch.Tensor) -> LayerTables:
        """Return these tables as parts of ``numbers``, which are :meth:`joined` on a device."""
        others = iter(parts_of(numbers, self._numbers))
        return LayerTables(rows=_with_tensors(self.rows, others), experts=_with_tensors(self.experts, others))

    @property
    def _numbers(self) -> list[Ints]:
        return [
            value.numpy() for part in (self.rows, self.experts) for value in vars(part).values() if _is_tensor(value)
        ]


@dataclass(eq=False)
class FixedTables:
    """A layer's tables at addresses that stay, for launches that are repeated with other placements.

    All ``tables`` are parts of ``numbers``, int64 ``[n]``, and hold ``placement`` now; graphs carry ``first``.
    """

    room: Room
    tables: LayerTables
    numbers: torch.Tensor
    placement: Placement
    first: Placement

    @classmethod
    def of(cls, placement: Placement, layer: Layer, before: FixedTables | None = None) -> FixedTables:
        """Return tables of ``placement`` with room for others; with the same owners, for all that ``before`` had."""
        # Where a policy makes no replicas, graphs have no slots for any.
        room = Room.generous(placement) if layer.placer.model.policy.replicates else Room.needed(placement)
        if before is not None and before.first.owners == placement.owners:
            room = room.joined(before.room)
        host = LayerTables.from_placement(placement, layer, room)
        numbers = on_device(host.joined(), layer.world.device)
        return cls(room, host.within(numbers), numbers, placement, placement)

    def has_room_for(self, placement: Placement) -> bool:
        """Tell whether the tables have room for ``placement``; the same on all ranks."""
        return placement.owners == self.first.owners and self.room.holds(Room.needed(placement))

    def write(self, placement: Placement, layer: Layer) -> None:
        """Write ``placement`` into the tables, for launches after this."""
        if placement != self.placement:
            host = LayerTables.from_placement(placement, layer, self.room)
            self.numbers.copy_(on_device(host.joined(), layer.world.device), non_blocking=True)
            self.placement = placement


@dataclass(frozen=True, eq=False)
class Recorded:
    """Tables that recorded launches read, by layer, and ``OneSided.signature``, int64 ``[3]``, sent with counts."""

    layers: dict[int, FixedTables]
    signature: torch.Tensor


_HOST = torch.device("cpu")


def _with_tensors(part: Part, others: Iterator[torch.Tensor]) -> Part:
    """Return ``part`` with the next of ``others`` in place of each of its tensors."""
    changes: dict[str, Any] = {name: next(others) for name, value in vars(part).items() if _is_tensor(value)}
    return replace(part, **changes)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _fill(numbers: Ints, length: int) -> Ints:
    """Pad ``numbers`` with zeros to ``length``."""
    return np.pad(numbers, (0, length - len(numbers)))
