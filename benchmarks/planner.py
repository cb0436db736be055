"""How long a plan takes: one layer, one core, the parts that every rank computes, compiled and as Python in turns.

    python -m benchmarks.planner

Loads are zipf with a random walk from step to step; 32,768 rows a rank; two replicas a rank; eight ranks a node where
there is more than one node. ``critical`` is what a step waits for between its gate and its exchange: quotas from the
counts, and the ticket from them. ``place`` is forecast and placement of the next step, of which every 32nd searches;
``owners`` are new ones, every 50 steps. Both planners must agree in every step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.results_folder import results_folder

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hecate.runtime.ops.ticket import make_tickets
from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.native import build, calls
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.planner import LayerSizes, Quotas, Rates
from hecate.runtime.placement.policy import LayerView
from hecate.runtime.placement.topology import Topology

# A layer of 2,048 x 768 in bfloat16, and an H100.
SIZES = LayerSizes(row_flops=2 * 3 * 2048 * 768, row_bytes=2 * 2048, expert_bytes=2 * 3 * 2048 * 768)
RATES = Rates(flops=4e14, rank_bytes=4.5e11, node_bytes=4e11, memory_bytes=2.7e12, hidden_seconds=3e-3)
# Ranks, experts, steps to measure.
SCALES = ((8, 64, 100), (64, 128, 70), (256, 128, 40), (1024, 256, 36))
PARTS = ("critical", "place", "owners")
ZIPF, ROWS, WINDOW = 0.8, 32_768, 5


def measure(world_size: int, experts: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each part, by planner."""
    topology, owners = Topology.even(world_size, 8 if world_size > 8 else 4), Owners.contiguous(experts, world_size)
    planners = {"compiled": Hecate(replicas=2), "python": Hecate(replicas=2)}
    found: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in planners}
    rank, history = world_size * 5 // 8, list[Ints]()
    for step, counts in enumerate(routing(world_size, experts, steps + WINDOW)):
        view = LayerView(
            id=0,
            owners=owners,
            loads=tuple(history[-WINDOW:]),
            long_load=np.sum([*history, counts.sum(0)], axis=0),
            topology=topology,
            sizes=SIZES,
            rates=RATES,
        )
        history.append(counts.sum(0))
        agreed: list[Any] = []
        for name, policy in planners.items():
            with planner_of(name):
                times, result = plan(policy, view, counts, rank, moves=step % 10 == 9)
            agreed.append(result)
            if step >= WINDOW:
                for part, seconds in times.items():
                    found[name][part].append(seconds * 1e3)
        assert agreed[0] == agreed[1], f"the planners disagree in step {step} of {world_size} ranks"
    return found


def plan(policy: Hecate, view: LayerView, counts: Ints, rank: int, *, moves: bool) -> tuple[dict[str, float], Any]:
    """Seconds of each part of a step, and what was planned."""
    times: dict[str, float] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        times[part] = time.perf_counter() - start
        return result

    placement = timed("place", lambda: policy.place(view))
    # These are worked out beside the placement, where nothing waits for them.
    _ = placement.pairs, placement.starts, placement.leaving, placement.slots_on(rank)

    def critical() -> Quotas:
        quotas = policy.assign(view, placement, counts, rank)
        make_tickets(quotas, torch.device("cpu"))
        return quotas

    quotas = timed("critical", critical)
    owners = timed("owners", lambda: policy.choose_owners([view])) if moves else None
    return times, (placement, quotas.sent.tolist(), quotas.received.tolist(), owners)


def routing(world_size: int, experts: int, steps: int) -> Iterator[Ints]:
    rng = np.random.default_rng(0)
    logits = -ZIPF * np.log(rng.permutation(experts) + 1.0)
    for _ in range(steps):
        logits += rng.normal(0, 0.02, experts)
        weights = np.exp(logits)
        yield rng.multinomial(ROWS, weights / weights.sum(), size=world_size)


@contextmanager
def planner_of(name: str) -> Iterator[None]:
    with patch.object(calls, "library", build.library if name == "compiled" else lambda: None):
        yield


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if build.library() is None:
        raise SystemExit("there is no C++ compiler, or HECATE_NATIVE=0 is set: nothing to compare")
    table = Table("ranks", "experts", "part", "compiled ms", "worst", "python ms", "worst", "ratio")
    results = []
    for world_size, experts, steps in SCALES:
        found = measure(world_size, experts, steps)
        for part in PARTS:
            ours, theirs = found["compiled"][part], found["python"][part]
            ratio = f"{np.median(theirs) / np.median(ours):.1f}"
            row = (spread(ours), f"{max(ours):.2f}", spread(theirs), f"{max(theirs):.1f}", ratio)
            table.add_row(str(world_size), str(experts), part, *row)
        results.append(dict(ranks=world_size, experts=experts, zipf=ZIPF, rows=ROWS, **found))
    Console(width=130).print(table)
    path = results_folder() / "planner.json"
    path.write_text(
        json.dumps(json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 4))) + "\n"
    )
    print(path)


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


if __name__ == "__main__":
    main()
