"""What moves between steps because it stays where it is: owners' experts, and moments of replicas that stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel

# ``CostModel.move_seconds`` is for parameters and two moments.
_MOMENTS = 2 / 3


@dataclass(kw_only=True)
class Moves:
    """Of one workload, since it began.

    Attributes:
        owners: seconds, measured, in which experts moved to new owners with their optimizer state.
        moments: seconds, worked out, in which the moments of new replicas travelled.
        steps: of the workload.
    """

    owners: float = 0.0
    moments: float = 0.0
    steps: int = 0

    def per_step(self) -> dict[str, float]:
        """Of a sample: all moves, and the part of them that is worked out."""
        steps = max(1, self.steps)
        return {"moves": (self.owners + self.moments) / steps, "moments": self.moments / steps}


def moments_seconds(before: Placement, after: Placement, costs: CostModel) -> float:
    """Seconds in which new replicas get two moments each, from the nearest copy, hidden behind nothing.

    Their parameters are not in it: those travel in the step that follows, which is measured. Nor are new owners'.
    """
    nodes, sources, destinations = costs.topology.node_of, [], []
    for had, have, owner in zip(before.holders, after.holders, after.owners.ranks, strict=True):
        for rank in set(have) - set(had) - {owner}:
            sources.append(min(had, key=lambda copy: (nodes[copy] != nodes[rank], copy)))
            destinations.append(rank)
    if not sources:
        return 0.0
    return _MOMENTS * costs.move_seconds(np.asarray(sources), np.asarray(destinations))
