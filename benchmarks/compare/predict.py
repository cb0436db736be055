"""Does ``hecate simulate`` predict what was measured?

    python -m benchmarks.compare.predict          all cells in benchmarks/results/compare.*.json

The simulated cluster has the rates that the ranks measured with their quota before the first step, and no number that
was fitted to the steps. Written are predicted and measured medians of every policy and workload.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hecate
from benchmarks.cluster.quota import QUOTA_US
from benchmarks.compare import report, routing, shapes, systems
from benchmarks.compare.rank import MANY
from benchmarks.compare.workloads import counts_of
from hecate.runtime.owners import Owners
from hecate.runtime.planner import Rates
from hecate.runtime.policies import Policy, Static
from hecate.simulator import Capture, ClusterSpec, Simulator, capture, walk
from hecate.simulator.program import Start
from hecate.simulator.step import UPDATE_PASSES
from hecate.simulator.workloads import make

RESULTS = Path(__file__).parents[1] / "results"


def cluster_of(cell: dict[str, Any], shape: shapes.Shape) -> ClusterSpec:
    """The emulated cluster as its ranks measured it before the first step.

    Rates of links are used as they are. Rates of compute are those of single operators; a whole graph takes longer.
    By how much, a model of the same shape says that exchanges nothing, once with the rows of a rank and once with
    four times as many. What static EP's step takes beyond that, with even routing and on links that take no time, is
    what collectives cost their ranks; less what a rank gets for nothing each time it waited, a quota of CPU time.
    """
    measured = ClusterSpec(name="emulated", nodes=shapes.NODES, gpus=shapes.RANKS_PER_NODE, **cell["machine"])
    alone = cell["alone"]
    few, many = (_seconds_alone(shape, times, measured) for times in (1, MANY))
    rows = (many - few) / (MANY - 1)
    per_row = (alone["many"] - alone["step"]) / (many - few)
    slower = (alone["step"] - per_row * rows) / (few - rows)
    parts = Simulator(_capture(shape, measured, Static()), measured).parts
    starts = sum(isinstance(item, Start) for _, items in parts for item in items)
    # Counts travel in these steps too, once a layer.
    beyond = alone["free"] - alone["step"] - alone["update"] - shape.layers * measured.latency
    for_nothing = QUOTA_US / 1e6 * (1 / shapes.CORES - 1)
    return replace(
        measured, flops=measured.flops / slower, memory_bytes=measured.memory_bytes / slower,
        operator=measured.operator * slower, routed=per_row / slower, start=max(0.0, beyond / starts - for_nothing),
    )  # fmt: skip


def _seconds_alone(shape: shapes.Shape, times: int, cluster: ClusterSpec) -> float:
    """What the simulator says of a model that exchanges nothing."""
    one, small = replace(cluster, nodes=1, gpus=1), systems.alone(shape, times)
    made = _capture(small, one, Static())
    even = make("balanced", steps=1, layers=shape.layers, ranks=1, experts=small.experts, rows=small.rows)
    ((_, routed),) = walk(
        Static(), even, [layer.owners for layer in made.layers], topology=one.topology, rates=one.rates,
        sizes=made.sizes,
    )  # fmt: skip
    return Simulator(made, one).step(routed).seconds


def _capture(shape: shapes.Shape, cluster: ClusterSpec, policy: Policy) -> Capture:
    ids = torch.zeros(shape.sequences, shape.sequence, dtype=torch.int64)
    with routing.replayed_routers():
        model = shapes.build(shape)
        routing.prepare(model, shape.tokens)
        config = hecate.Config(policy=policy, replicas=systems.REPLICAS)
        return capture(model, {"input_ids": ids, "labels": ids}, cluster, config)


def predict(cell: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median predicted seconds: workload -> system -> seconds."""
    shape = shapes.SHAPES[cell["cell"]["shape"]]
    cluster = cluster_of(cell, shape)
    captured: dict[Any, Capture] = {}
    found: dict[str, dict[str, float]] = {workload: {} for workload in cell["samples"]}
    # Seconds to update a byte, in terms of the memory's rate.
    update = cell["alone"]["update"] / cell["alone"]["parameter_bytes"] * cluster.memory_bytes / UPDATE_PASSES
    for name, policy in systems.policies().items():
        if name not in cell["cell"]["systems"]:
            continue
        key = (policy.replicates, policy.calibrates)
        if key not in captured:
            captured[key] = _capture(shape, cluster, policy)
        made = captured[key]
        simulator = Simulator(made, cluster, update=update * cell["alone"]["parameter_bytes"])
        for workload in found:
            counts = counts_of(workload, shape, cluster.ranks)
            steps = [sample["step"] for sample in cell["samples"][workload][name]]
            walked = walk(
                systems.policies()[name], counts, [Owners.contiguous(shape.experts, cluster.ranks)] * shape.layers,
                topology=cluster.topology, rates=Rates(**cell["rates"]),
                sizes=made.sizes, steps=steps,
            )  # fmt: skip
            found[workload][name] = statistics.median(simulator.step(layers).seconds for _, layers in walked)
    return found


def main() -> None:
    for name, cell in report.load(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS).items():
        predicted = predict(cell)
        for workload, by_system in predicted.items():
            for system, seconds in by_system.items():
                measured = statistics.median(s["seconds"] for s in cell["samples"][workload][system])
                print(name, workload, system, f"{seconds:.3f} {measured:.3f} {seconds / measured - 1:+.0%}")


if __name__ == "__main__":
    main()
