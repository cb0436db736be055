"""How much of the experts' transfer other work hides: predicted before the first step, measured in the first ones.

The paper takes the time of everything but the MoE layers, measured (section 4). It is what lies between the last
exchange of one MoE layer and the first of the next, where the schedule leaves the link to experts and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hecate.runtime.comm import collectives
from hecate.runtime.comm.collective import collective_named
from hecate.runtime.comm.measure_rates import NO_LINK
from hecate.runtime.comm.queue import Span
from hecate.runtime.comm.world import World
from hecate.runtime.placement.planner import Rates
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.step_mode import StepMode

# Measured before these training forwards, the first of which compile, until so many were whole. Their median counts.
_FIRST, _LAST, _ENOUGH = 3, 20, 3


def fewest_tokens(tokens: int, rates: Rates, world: World) -> int:
    """The fewest tokens that a rank has in a step; all ranks call this together.

    On one machine without a GPU it is 0: gloo copies with the cores that compute, so nothing travels for free.

    Args:
        tokens: of this rank.
    """
    if world.device.type == "cpu" and rates.node_bytes >= NO_LINK:
        return 0
    fewest = torch.tensor(tokens, device=world.control_device)
    collectives.all_reduce(fewest, world, dist.ReduceOp.MIN)
    return int(fewest)


def predict_hidden(tokens: int, dense_parameters: int, layers: int, rates: Rates) -> Rates:
    """Add what the schedule can hide to measured rates: the dense compute between two MoE layers, both directions.

    Args:
        tokens: from :func:`fewest_tokens`.
        dense_parameters: elements of the matrices outside the experts, in all layers.
        layers: MoE layers.
    """
    if not tokens:
        return rates
    return replace(rates, hidden_seconds=dense_seconds(tokens, dense_parameters, layers, rates.flops))


def dense_seconds(tokens: int, dense_parameters: int, layers: int, flops: float) -> float:
    """Dense compute of one layer and step: a multiply and an add for each element and token, three times."""
    return 3 * 2 * tokens * dense_parameters / layers / flops


def measure_hidden(spans: Iterable[Span], world: World) -> float:
    """Seconds between two MoE layers in the steps that ``spans`` are of, forward and backward together.

    The median over the layers of a rank, and the least of all ranks, which call this together. Infinite if no rank
    has two layers in a row in both directions.
    """
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    for part, gap in _gaps(list(spans)):
        seconds[part].append(gap)
    mine = sum(median(gaps) if gaps else math.inf for gaps in seconds.values())
    least = torch.tensor(mine, dtype=torch.float64, device=world.control_device)
    collectives.all_reduce(least, world, dist.ReduceOp.MIN)
    return float(least)


def _gaps(spans: list[Span]) -> Iterator[tuple[str, float]]:
    """The time between the layers' exchanges, less that in which dense parameters or gradients have the link."""
    # What a layer needs at once; everything else travels between layers.
    exchanges = [span for span in spans if _is_exchange(span)]
    others = [span for span in spans if not _is_exchange(span)]
    for before, after in pairwise(exchanges):
        if before.part == after.part and before.subject != after.subject and before.ready:
            taken = sum(_taken(span, before.ready, after.started) for span in others)
            yield after.part, max(0.0, after.started - before.ready - taken)


def _is_exchange(span: Span) -> bool:
    return collective_named(span.operator).role == "exchange"


def _taken(span: Span, begin: float, end: float) -> float:
    """Seconds between ``begin`` and ``end`` in which nothing more can travel behind compute."""
    # For experts the compute should not have stood still; all else has the link to itself.
    hideable = collective_named(span.operator).carries == "replicas"
    first, last = (span.waited, span.ready) if hideable else (span.begun, span.ended)
    return max(0.0, min(last, end) - max(first, begin))


def can_measure(placer: Placer, world: World) -> bool:
    """Whether the host sees when compute runs, which it does not with a GPU, and there is something to hide.

    On a single node nothing is hidden: see :func:`predict_hidden`.
    """
    return world.device.type == "cpu" and placer.topology.num_nodes > 1 and placer.policy.replicates


@dataclass
class HiddenTime:
    """Puts the measured time in the place of the predicted one, as the first steps go by: the median of three.

    All ranks do it before the same forwards, so their plans stay equal.
    """

    placer: Placer
    world: World
    _steps: int = 0
    _found: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """How far it is, for checkpoints."""
        return {"steps": self._steps, "found": list(self._found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps, self._found = state["steps"], list(state["found"])

    def before_forward(self, mode: StepMode) -> None:
        """Called by all ranks. The queue still has the spans of the forward and backward before this one."""
        if not mode.training or len(self._found) == _ENOUGH or self._steps > _LAST:
            return
        self._steps += 1
        if not _FIRST <= self._steps <= _LAST:
            return
        queue = self.world.queue
        # What is on its way must not meet the measurement's own collective.
        queue.drain()
        hidden = measure_hidden(queue.spans, self.world)
        if math.isfinite(hidden):
            self._found.append(hidden)
            self.placer.set_rates(
                replace(self.placer.rates, hidden_seconds=median(self._found)),
                because=f"hidden time measured in {len(self._found)} of the first steps",
            )
