"""Layers that no model has."""

from __future__ import annotations

from hecate.runtime.comm.world import World
from hecate.runtime.ops.by_nodes import ByNodes
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state import layer
from hecate.runtime.state.layer import Carrier, Layer
from hecate.runtime.state.placer import Placer


def add_layer(
    *, name: str, owners: Owners, world: World, carrier: Carrier | None = None, placer: Placer | None = None
) -> Layer:
    """A record with the next free number; without a carrier collectives carry its rows."""
    carrier = ByNodes() if carrier is None else carrier
    return layer.add_layer(name=name, owners=owners, world=world, carrier=carrier, placer=placer)
