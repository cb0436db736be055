"""Time in which other work hides the experts' transfer: predicted before the first step, measured in the first.

It is the time between the last exchange of one MoE layer and the first of the next, where the schedule leaves the
link to experts and gradients (the paper takes all but the MoE layers, section 4).
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

# Training forwards before which the time is measured: from the third on, since the first compile, to the twentieth at
# most, until three whole steps were measured. Their median counts.
_FIRST, _LAST, _ENOUGH = 3, 20, 3


def overlaps(rates: Rates, world: World) -> bool:
    """Return whether compute can hide a transfer: on one machine without a GPU gloo copies with the same cores."""
    return world.device.type != "cpu" or rates.node_bytes < NO_LINK


def fewest_tokens(tokens: int, world: World) -> int:
    """Return the fewest ``tokens`` that a rank has in a step; a collective."""
    fewest = torch.tensor(tokens, device=world.control_device)
    collectives.all_reduce(fewest, world, dist.ReduceOp.MIN)
    return int(fewest)


def predict_hidden(tokens: int, dense_parameters: int, layers: int, rates: Rates) -> Rates:
    """Add the time that can hide transfers to measured rates: dense compute between two MoE layers, both ways."""
    if not tokens:
        return rates
    return replace(rates, hidden_seconds=dense_seconds(tokens, dense_parameters, layers, rates.flops))


def dense_seconds(tokens: int, dense_parameters: int, layers: int, flops: float) -> float:
    """Return the seconds of a layer's dense compute in a step: multiply-adds per element and token, three times."""
    return 3 * 2 * tokens * dense_parameters / layers / flops


def measure_hidden(spans: Iterable[Span], world: World) -> float:
    """Return the seconds between two MoE layers in the steps of ``spans``, both directions together. A collective.

    It is the median over the layers of a rank, and the least of all ranks of all groups; infinite if no rank has two
    layers in a row in both directions.
    """
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    for part, gap in _gaps(list(spans)):
        seconds[part].append(gap)
    mine = sum(median(gaps) if gaps else math.inf for gaps in seconds.values())
    least = torch.tensor(mine, dtype=torch.float64, device=world.everyone.control_device)
    collectives.all_reduce(least, world.everyone, dist.ReduceOp.MIN)
    return float(least)


def _gaps(spans: list[Span]) -> Iterator[tuple[str, float]]:
    """Yield the seconds between layers' exchanges, less those in which dense parameters or gradients use the link."""
    # A layer needs its exchanges at once; everything else travels between layers.
    exchanges = [span for span in spans if _is_exchange(span)]
    others = [span for span in spans if not _is_exchange(span)]
    for before, after in pairwise(exchanges):
        if before.part == after.part and before.subject != after.subject and before.ready:
            taken = sum(_taken(span, before.ready, after.started) for span in others)
            yield after.part, max(0.0, after.started - before.ready - taken)


def _is_exchange(span: Span) -> bool:
    return collective_named(span.operator).role == "exchange"


def _taken(span: Span, begin: float, end: float) -> float:
    """Return the seconds between ``begin`` and ``end`` in which nothing more can travel behind compute."""
    # Experts take away only the time in which the compute stood still for them; all else has the link to itself.
    hideable = collective_named(span.operator).carries == "replicas"
    first, last = (span.waited, span.ready) if hideable else (span.begun, span.ended)
    return max(0.0, min(last, end) - max(first, begin))


def can_measure(placer: Placer, world: World) -> bool:
    """Tell whether the host sees when compute runs, which it does not with a GPU, and there is something to hide."""
    return world.device.type == "cpu" and placer.topology.num_nodes > 1 and placer.policy.replicates


@dataclass
class HiddenTime:
    """Replaces the predicted time by the median of three measured ones, before the same forwards on all ranks."""

    placer: Placer
    world: World
    _steps: int = 0
    _found: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "found": list(self._found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._found = state["steps"], list(state["found"])

    def before_forward(self, mode: StepMode) -> None:
        """Measure, if it is time to; the queue still has the spans of the last forward and backward. A collective."""
        if not mode.training or len(self._found) == _ENOUGH or self._steps > _LAST:
            return
        self._steps += 1
        if not _FIRST <= self._steps <= _LAST:
            return
        queue = self.world.everyone.queue
        # Collectives under way must not mix with the measurement's own.
        queue.drain()
        hidden = measure_hidden(queue.spans, self.world)
        if math.isfinite(hidden):
            self._found.append(hidden)
            self.placer.set_rates(
                replace(self.placer.rates, hidden_seconds=median(self._found)),
                because=f"hidden time measured in {len(self._found)} of the first steps",
            )
