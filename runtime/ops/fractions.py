"""The operator that makes counts of a rank's own tokens those of all ranks, for losses.

| operator | shapes | backward |
|---|---|---|
| ``average_fractions`` | ``[n] -> [n]``, the mean over all ranks of all groups | none |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.ops.registration import define_collective, differentiate
from hecate.runtime.state.layer import get_layer


def _average_fractions(counts: Tensor, of_layer: int) -> Job:
    # Any layer knows the ranks of its model.
    world = get_layer(of_layer).world.everyone
    mean = counts.clone()

    def run() -> Tensor:
        collectives.all_reduce(mean, world)
        return mean.div_(world.size)

    return Job(world.queue, run, label="average_fractions of a balance loss")


define_collective(
    "average_fractions(Tensor counts, int of_layer) -> Tensor",
    _average_fractions,
    lambda counts, of_layer: torch.empty_like(counts),
    # For the schedule it is like a gradient: only the results of the graph need it.
    role="reduce",
    carries="fractions",
    ring_rounds=2,
    saved_in_checkpoints="always",
    results="fractions",
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
    # Counts of choices have no gradient.
    return None, None


differentiate("average_fractions", _backward, _setup)
