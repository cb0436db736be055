"""How long a plan takes: one layer, one core, the parts that every rank computes in every step.

    python -m benchmarks.planner

Loads are zipf with a random walk from step to step; rows are 4,096 per rank; two replicas per rank; eight ranks per
node where there is more than one node. ``place`` is prediction and placement, ``assign`` this rank's quotas from the
counts of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from benchmarks.results_folder import results_folder

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from hecate.runtime.placement.hecate_policy import Hecate, Objective
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner import LayerSizes, Rates
from hecate.runtime.placement.policy import LayerView
from hecate.runtime.placement.topology import Topology

SIZES = LayerSizes(row_flops=2 * 2 * 768 * 1536, row_bytes=2 * 768, expert_bytes=2 * 2 * 768 * 1536)
RATES = Rates(flops=5e13, rank_bytes=150e9, node_bytes=12.5e9, hidden_seconds=4e-3)
# Ranks, experts, steps to measure, milliseconds allowed.
SCALES = ((8, 64, 200, 0.5), (64, 128, 100, 2.0), (1024, 256, 24, 20.0))
ZIPF = (0.3, 0.8, 1.2)


def measure(world_size: int, experts: int, steps: int, zipf: float, objective: Objective) -> dict[str, list[float]]:
    """Milliseconds of both parts in every step."""
    rng = np.random.default_rng(0)
    topology = Topology.even(world_size, 8)
    owners = Owners.contiguous(experts, world_size)
    policy = Hecate(objective=objective)
    logits = -zipf * np.log(rng.permutation(experts) + 1.0)
    history: list[Any] = []
    found: dict[str, list[float]] = {"place": [], "assign": []}
    for step in range(steps + policy.window):
        logits += rng.normal(0, 0.02, experts)
        weights = np.exp(logits)
        counts = rng.multinomial(4096, weights / weights.sum(), size=world_size)
        view = LayerView(
            id=0,
            owners=owners,
            loads=tuple(history[-policy.window :]),
            long_load=counts.sum(0),
            topology=topology,
            sizes=SIZES,
            rates=RATES,
        )
        start = time.perf_counter()
        placement = policy.place(view)
        middle = time.perf_counter()
        policy.assign(view, placement, counts, rank=world_size // 2)
        end = time.perf_counter()
        history.append(counts.sum(0))
        if step >= policy.window:
            found["place"].append((middle - start) * 1e3)
            found["assign"].append((end - middle) * 1e3)
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table = Table("objective", "ranks", "experts", "zipf", "place ms", "assign ms", "together ms", "allowed ms")
    results = []
    for objective in ("time", "paper"):
        for world_size, experts, steps, allowed in SCALES:
            for zipf in ZIPF:
                found = measure(world_size, experts, steps, zipf, objective)
                both = np.add(found["place"], found["assign"])
                table.add_row(
                    objective,
                    str(world_size),
                    str(experts),
                    str(zipf),
                    spread(found["place"]),
                    spread(found["assign"]),
                    spread(both),
                    str(allowed),
                )
                results.append(
                    dict(
                        objective=objective, ranks=world_size, experts=experts, zipf=zipf, allowed_ms=allowed, **found
                    )
                )
    Console(width=130).print(table)
    path = results_folder() / "planner.json"
    path.write_text(json.dumps(results, default=lambda value: round(value, 4)) + "\n")
    print(path)


def spread(values: Any) -> str:
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


if __name__ == "__main__":
    main()
