"""Placements under launches that are recorded once and replayed, as in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from hecate.runtime.comm.collectives import on_device
from hecate.runtime.one_sided.device_tables import LayerTables, Room
from hecate.runtime.one_sided.late_news import LateNews, Message
from hecate.runtime.placement.placement import Placement
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer


@dataclass(eq=False)
class FixedTables:
    """A layer's tables at addresses that stay, for launches that are repeated with other placements.

    Attributes:
        room: of all placements that come.
        tables: what launches read; all are parts of ``numbers``.
        numbers: int64 ``[n]``.
        placement: the one in the tables now.
        first: the one when the launches were recorded, which graphs carry.
    """

    room: Room
    tables: LayerTables
    numbers: torch.Tensor
    placement: Placement
    first: Placement

    @classmethod
    def of(cls, placement: Placement, layer: Layer, before: FixedTables | None = None) -> FixedTables:
        """Return tables of ``placement``, with room for others.

        Args:
            before: tables without room for it. With the same owners, the new ones have room for all that these had.
        """
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
    """Tables that recorded launches read in place of the placements that graphs carry.

    Attributes:
        layers: by their numbers.
        signature: the numbers that travel with counts, int64 ``[3]``; see ``OneSided.signature``.
    """

    layers: dict[int, FixedTables]
    signature: torch.Tensor


class Recordable(Protocol):
    """A carrier whose operators read ``recorded``, if it is set, while launches are recorded."""

    recorded: Recorded | None
    news: LateNews

    def signature(self, plans: int) -> torch.Tensor:
        """Return a digest of plans, and proof of all collectives, int64 ``[3]`` on the device."""


class FollowedTables:
    """The :class:`~hecate.runtime.state.layer.Replays` of a carrier that keeps placements on the device."""

    def __init__(self, carrier: Recordable, placer: Placer) -> None:
        self._carrier, self._placer = carrier, placer
        self._now: Recorded | None = None
        self._before: Recorded | None = None
        self._messages: list[Message] = []

    def prepare(self, placements: Mapping[Layer, Placement]) -> None:
        had = {} if self._before is None else self._before.layers
        tables = {
            layer.id: FixedTables.of(placement, layer, had.get(layer.id)) for layer, placement in placements.items()
        }
        self._now = Recorded(tables, self._signature())

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
        self._now.signature.copy_(self._signature(), non_blocking=True)

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

    def _signature(self) -> torch.Tensor:
        return self._carrier.signature(self._placer.signature)
