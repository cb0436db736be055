"""Does ``hecate simulate`` predict what was measured?

    python -m benchmarks.compare.predict          all cells in benchmarks/results/compare.*.json

The simulated cluster has the rates that the ranks measured with their quota before the first step, and no number that
was fitted to the steps. Written are predicted and measured medians of every policy and workload.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

import hecate
from benchmarks.compare import report, routing, shapes
from benchmarks.compare.systems import REPLICAS, policies
from benchmarks.compare.workloads import counts_of
from hecate.runtime.owners import Owners
from hecate.runtime.planner import Rates
from hecate.simulator import ClusterSpec, Simulator, capture, walk

RESULTS = Path(__file__).parents[1] / "results"


def cluster_of(cell: dict[str, Any]) -> ClusterSpec:
    """The emulated cluster as its ranks measured it."""
    return ClusterSpec(name="emulated", nodes=shapes.NODES, gpus=shapes.RANKS_PER_NODE, **cell["machine"])


def predict(cell: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median predicted seconds: workload -> system -> seconds."""
    shape, cluster = shapes.SHAPES[cell["cell"]["shape"]], cluster_of(cell)
    ids = torch.zeros(shape.sequences, shape.sequence, dtype=torch.int64)
    captured: dict[Any, Any] = {}
    found: dict[str, dict[str, float]] = {workload: {} for workload in cell["samples"]}
    for name, policy in policies().items():
        if name not in cell["cell"]["systems"]:
            continue
        key = (policy.replicates, policy.calibrates)
        if key not in captured:
            with routing.replayed_routers():
                model = shapes.build(shape)
                routing.prepare(model, shape.tokens)
                config = hecate.Config(policy=policy, replicas=REPLICAS)
                captured[key] = capture(model, {"input_ids": ids, "labels": ids}, cluster, config)
        made = captured[key]
        simulator = Simulator(made, cluster)
        for workload in found:
            counts = counts_of(workload, shape, cluster.ranks)
            steps = [sample["step"] for sample in cell["samples"][workload][name]]
            walked = walk(
                policies()[name], counts, [Owners.contiguous(shape.experts, cluster.ranks)] * shape.layers,
                topology=cluster.topology, rates=Rates(**cell["rates"]),
                sizes=made.sizes, steps=steps,
            )  # fmt: skip
            found[workload][name] = statistics.median(simulator.step(layers).seconds for _, layers in walked)
    return found


def main() -> None:
    for name, cell in report.load(RESULTS).items():
        predicted = predict(cell)
        for workload, systems in predicted.items():
            for system, seconds in systems.items():
                measured = statistics.median(s["seconds"] for s in cell["samples"][workload][system])
                print(name, workload, system, f"{seconds:.3f} {measured:.3f} {seconds / measured - 1:+.0%}")


if __name__ == "__main__":
    main()
