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

import torch
import torch.distributed as dist

from hecate.runtime.measure import NO_LINK
from hecate.runtime.placer import Placer
from hecate.runtime.planner import Rates
from hecate.runtime.queue import Span
from hecate.runtime.world import World

# What a layer needs at once; everything else travels between layers.
EXCHANGES = ("gather_counts", "top_up", "exchange", "exchange_back")
# Before this training step the one before is measured for the first time, and not one that compiled; before the last
# one it gives up. The median of some counts.
_FIRST, _LAST, _MEASURED = 3, 20, 3


def predict_hidden(tokens: int, dense_parameters: int, layers: int, rates: Rates, world: World) -> Rates:
    """Add what the schedule can hide to measured rates: the dense compute between two MoE layers, both directions.

    On one machine without a GPU it stays 0: gloo copies with the cores that compute, so nothing is for free.

    Args:
        tokens: in a step of this rank; the smallest of all ranks counts. All ranks call this together.
        dense_parameters: elements of the matrices outside the experts, in all layers.
        layers: MoE layers.
    """
    if world.device.type == "cpu" and rates.node_bytes >= NO_LINK:
        return rates
    fewest = torch.tensor(tokens, device=world.control_device)
    dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=world.group)
    return replace(rates, hidden=hidden_seconds(int(fewest), dense_parameters, layers, rates.flops))


def hidden_seconds(tokens: int, dense_parameters: int, layers: int, flops: float) -> float:
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
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=world.group)
    return float(least)


def _gaps(spans: list[Span]) -> Iterator[tuple[str, float]]:
    """The time between the layers' exchanges, less that in which the compute stood still for something else."""
    exchanges = [span for span in spans if span.operator in EXCHANGES]
    for before, after in pairwise(exchanges):
        if before.part == after.part and before.subject != after.subject and before.ready:
            still = sum(
                span.exposed
                for span in spans
                if span.operator not in EXCHANGES and before.ready <= span.waited and span.ready <= after.started
            )
            yield after.part, max(0.0, after.started - before.ready - still)


@dataclass
class HiddenTime:
    """Puts the measured time in the place of the predicted one, as the first steps go by: the median of three.

    Only where the host sees when compute runs, which it does not with a GPU, and only between nodes: see
    :func:`predict_hidden`. All ranks do it before the same forwards, so their plans stay equal.
    """

    placer: Placer
    world: World
    _steps: int = 0
    _found: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (
            self.world.device.type != "cpu"
            or self.placer.topology.num_nodes == 1
            or not self.placer.policy.replicates
        ):
            self._steps = _LAST

    def before_forward(self) -> None:
        """Called by all ranks. The queue still has the spans of the forward and backward before this one."""
        if self._steps == _LAST or len(self._found) == _MEASURED or not torch.is_grad_enabled():
            return
        self._steps += 1
        if self._steps < _FIRST:
            return
        queue = self.world.queue
        # What is on its way must not meet the measurement's own collective.
        queue.drain()
        hidden = measure_hidden(queue.spans, self.world)
        if math.isfinite(hidden):
            self._found.append(hidden)
            self.placer.rates = replace(self.placer.rates, hidden=median(self._found))
