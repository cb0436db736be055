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
# Every how many steps policies change owners; of the others these are multiples.
OWNERS_CHANGE = (10, 25)


def counts_of(name: str, shape: Shape, world_size: int, seed: int = 0) -> NDArray[np.int64]:
    """Rows of every step, layer, rank and expert: int64 ``[step, layer, rank, expert]``.

    With 32 experts on 8 ranks the busiest one gets 4 to 5 times the mean in zipf and drift, as in the paper.

    Args:
        seed: of what is made up; what was recorded has none.

    Raises:
        ValueError: there is no such workload, or the recorded one does not fit the shape.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    if name in RECORDED:
        return _recorded(name, shape, world_size)
    return workloads.make(
        name, steps=STEPS, layers=shape.layers, ranks=world_size, experts=shape.experts, rows=shape.rows, seed=seed
    )


def timed_steps(name: str, counts: NDArray[np.int64], first: int, rounds: int, seed: int) -> list[int]:
    """One step of each of ``rounds`` equal parts of a trace from ``first`` on, by chance, in order.

    Drawn, because steps at equal distances would meet the periods of workloads and policies. Of bursts only steps in
    one are taken: the others are even. None is right before owners may change: the engine plans a step while it runs
    the one before, and again when owners have changed since, and a policy that remembers would then do something else
    here than offline.

    Args:
        counts: of :func:`counts_of`.
    """
    steps = [step for step in range(first, len(counts)) if all((step + 1) % every for every in OWNERS_CHANGE)]
    if name == "burst":
        load = counts.sum(2)
        # One expert has about half of a layer's rows, where each has a few percent otherwise.
        steps = [step for step in steps if (load[step].max(-1) > 4 * load[step].mean(-1)).any()]
    rng = np.random.default_rng(seed)
    return [int(rng.choice(part)) for part in np.array_split(np.asarray(steps), rounds)]


def _recorded(name: str, shape: Shape, world_size: int) -> NDArray[np.int64]:
    counts, _ = workloads.load_trace(TRACES / f"{name}.npz")
    _, layers, ranks, experts = counts.shape
    if layers < shape.layers or ranks != world_size or experts != shape.experts:
        raise ValueError(
            f"{name} was recorded with {layers} layers, {ranks} ranks and {experts} experts; {shape.name} has "
            f"{shape.layers}, {world_size} and {shape.experts}"
        )
    return workloads.scale(counts[:, : shape.layers], shape.rows)
