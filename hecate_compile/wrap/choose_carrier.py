"""The carriers of a model's rows and experts, by their names in ``Config(transport=...)``: one line for each."""

from __future__ import annotations

from collections.abc import Callable

from hecate.config import Config
from hecate.runtime.comm.world import World
from hecate.runtime.one_sided.carrier import OneSided
from hecate.runtime.ops.by_collectives import ByCollectives
from hecate.runtime.ops.by_nodes import ByNodes
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Carrier


def _by_collectives(config: Config, topology: Topology, world: World) -> Carrier:
    return ByCollectives() if config.dispatch == "rows" else ByNodes()


def _one_sided(config: Config, topology: Topology, world: World) -> Carrier:
    return OneSided.between(world, topology, config.room_percent)


CARRIERS: dict[str, Callable[[Config, Topology, World], Carrier]] = {
    "collectives": _by_collectives,
    "symmetric": _one_sided,
}


def choose_carrier(config: Config, topology: Topology, world: World) -> Carrier:
    """Return the carrier of a model's layers, a collective; ValueError or RuntimeError if ranks cannot use it."""
    return (CARRIERS[config.transport] if world.size > 1 else _by_collectives)(config, topology, world)
