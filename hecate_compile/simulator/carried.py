"""What one layer sends between ranks: rows, straight or by relays, and experts."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.ops.node_ticket import relays_of
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import stages_of
from hecate.runtime.placement.topology import Topology
from hecate.simulator.replay import LayerStep

Floats = NDArray[np.float64]


class Carried:
    """The rows and experts of one layer between ranks, ``[W, W]``.

    ``together`` is how many rows of a token cross to a node as one; 1 if that is not known.
    """

    def __init__(self, layer: LayerStep, topology: Topology, together: int) -> None:
        self.layer, self.topology, self.together = layer, topology, together
        self.rows = layer.rows.astype(np.float64)
        self.owned = layer.placement.owners.counts

    @cached_property
    def told(self) -> Floats:
        """Rows that each rank tells each relay of (``hecate.runtime.ops.node_ticket``)."""
        return self._at_relays(self._to_nodes)

    @cached_property
    def to_relays(self) -> Floats:
        """Rows that cross once for their token: the planner's estimate, since counts do not say which these are."""
        total = np.maximum(self.rows.sum(1, keepdims=True), 1.0)
        alone = (1 - self._to_nodes / total) ** self.together
        return self._at_relays(total / self.together * (1 - alone))

    @cached_property
    def from_relays(self) -> Floats:
        """Rows from relays to holders in their node, all of them."""
        found = np.zeros_like(self.rows)
        destinations = np.arange(self.topology.world_size)
        for source, relays in enumerate(relays_of(self.topology)):
            np.add.at(found, (relays[self.topology.nodes], destinations), self.rows[source])
        return found

    @cached_property
    def _to_nodes(self) -> Floats:
        """Rows from each rank to each node, ``[W, N]``."""
        return np.stack([self.rows[:, list(ranks)].sum(1) for ranks in self.topology.members], axis=1)

    def _at_relays(self, to_nodes: Floats) -> Floats:
        found = np.zeros_like(self.rows)
        np.put_along_axis(found, relays_of(self.topology), to_nodes, axis=1)
        return found

    @cached_property
    def all(self) -> list[Floats]:
        return self._stages(self.layer.placement)

    @cached_property
    def planned(self) -> list[Floats]:
        return self.all if self.layer.planned is self.layer.placement else self._stages(self.layer.planned)

    @cached_property
    def late(self) -> list[Floats]:
        return self._stages(self.layer.placement, without=self.layer.planned)

    def _stages(self, placement: Placement, without: Placement | None = None) -> list[Floats]:
        """Return the experts from each rank to each, without those that the destination has by ``without``."""
        size = self.topology.world_size
        found = []
        for stage in stages_of(placement, self.topology):
            new = np.ones(len(stage.experts), dtype=bool)
            if without is not None:
                new = without.matrix[stage.experts, stage.destinations] == 0
            matrix = np.zeros((size, size))
            np.add.at(matrix, (stage.sources[new], stage.destinations[new]), 1.0)
            found.append(matrix)
        return found
