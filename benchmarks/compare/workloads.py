"""The workloads in the sizes of a shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.compare.shapes import Shape
from hecate.simulator import workloads

TRACES = Path(__file__).parents[1] / "traces"
# natural: recorded without an auxiliary loss; auxiliary: with one (benchmarks/traces/record.py).
RECORDED = ("natural", "auxiliary")
WORKLOADS = (*RECORDED, *workloads.WORKLOADS)
STEPS = 300
# zipf and drift: with 32 experts on 8 ranks the busiest one gets 4 to 5 times the mean, as in the paper.
SEED = 0


def counts_of(name: str, shape: Shape, world_size: int) -> NDArray[np.int64]:
    """Rows of every step, layer, rank and expert: int64 ``[step, layer, rank, expert]``.

    Raises:
        ValueError: there is no such workload, or the recorded one does not fit the shape.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    if name in RECORDED:
        return _recorded(name, shape, world_size)
    return workloads.make(
        name, steps=STEPS, layers=shape.layers, ranks=world_size, experts=shape.experts, rows=shape.rows, seed=SEED
    )


def _recorded(name: str, shape: Shape, world_size: int) -> NDArray[np.int64]:
    counts, _ = workloads.load_trace(TRACES / f"{name}.npz")
    _, layers, ranks, experts = counts.shape
    if layers < shape.layers or ranks != world_size or experts != shape.experts:
        raise ValueError(
            f"{name} was recorded with {layers} layers, {ranks} ranks and {experts} experts; {shape.name} has "
            f"{shape.layers}, {world_size} and {shape.experts}"
        )
    return workloads.scale(counts[:, : shape.layers], shape.rows)
