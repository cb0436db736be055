"""Collectives between their start and their wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from hecate.passes.fx import arguments_of
from hecate.runtime.comm.collective import Collective, start_of, wait_of


@dataclass(eq=False)
class InFlight:
    """A collective between its start and its wait."""

    start: Node
    wait: Node
    collective: Collective

    @property
    def role(self) -> str:
        return self.collective.role

    @property
    def layer(self) -> object:
        """MoE layer of an exchange."""
        return arguments_of(self.start)["layer"]


def in_flight(nodes: Iterable[Node]) -> list[InFlight]:
    """Return all split collectives, in the order of their starts."""
    nodes = list(nodes)
    waits = {node.args[0]: node for node in nodes if wait_of(node.target) is not None}
    found = ((start, waits.get(start), start_of(start.target)) for start in nodes)
    return [InFlight(start, wait, one) for start, wait, one in found if wait is not None and one is not None]
