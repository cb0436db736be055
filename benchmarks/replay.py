"""Replay a routing trace through placement policies, offline.

    python -m benchmarks.replay benchmarks/traces/natural.npz
    python -m benchmarks.replay trace.npz --nodes 2 --replicas 1 --png heat.png
    python -m benchmarks.replay benchmarks/traces/natural.npz --nodes 2 --rivals
    python -m benchmarks.replay --workload drift --rivals
    python -m benchmarks.replay --cell gpt-moe-s.a --cell bert-moe.a

Every policy sees what it would have seen in training: the counts of earlier steps. Printed are, per policy, the rows
of the busiest rank over the mean, the replicas and the bytes that travel, and the predicted time of a step and of
the moves before it (owners that change, and FlexMoE's new replicas, with optimizer states) in the
paper's regime (docs/planner.md); ``hecate replay`` takes the sizes of the model that was recorded. ``--png`` draws
expert load over time, and rank load before and after.

``--cell`` plays the policies of ``benchmarks.compare``, in its shape, on the links that it measured and with all
workloads: predicted milliseconds of a layer and step, after a few steps to warm
up, with the experts that move between steps, and their optimizer states, as their share of all steps. A minute each.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.compare import shapes, store
from benchmarks.compare.workloads import RECORDED, STEPS, TRACES
from benchmarks.policies import FasterMoE, FlexMoE, Laer, PostGate, SmartMoE
from benchmarks.results_folder import COMMITTED
from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.planner import LayerSizes, Rates
from hecate.runtime.placement.policy import Policy, Static
from hecate.runtime.placement.topology import Topology
from hecate.simulator.replay import Replay, replay
from hecate.simulator.workloads import load_trace, make, scale

# GPT-MoE-S of the paper: two matrices per expert, bf16, 40 % of a GPU's peak, links of its clusters A and B.
SIZES = LayerSizes(row_flops=2 * 2 * 768 * 1536, row_bytes=2 * 768, expert_bytes=2 * 2 * 768 * 1536)
CLUSTERS = {
    "a": Rates(flops=0.4 * 125e12, rank_bytes=150e9, node_bytes=12.5e9, hidden_seconds=4e-3),
    "b": Rates(flops=0.4 * 312e12, rank_bytes=300e9, node_bytes=50e9, hidden_seconds=1.6e-3),
}


def draw(path: Path, counts: np.ndarray[Any, Any], results: dict[str, Replay], layer: int) -> None:
    """Heat maps of one layer: experts over time, and ranks over time under each policy."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--png needs matplotlib: pip install 'hecate-compile[report]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    load = counts[:, layer].sum(1)
    figure, axes = plt.subplots(1 + len(results), 1, figsize=(10, 3 * (1 + len(results))), layout="constrained")
    share = load / np.maximum(load.mean(1, keepdims=True), 1e-9)
    image = axes[0].imshow(share.T, aspect="auto", interpolation="nearest", vmin=0)
    axes[0].set(title=f"layer {layer}: rows of each expert over the mean", ylabel="expert")
    figure.colorbar(image, ax=axes[0])
    ranks = {
        name: r.rows[:, layer] / np.maximum(r.rows[:, layer].mean(1, keepdims=True), 1e-9)
        for name, r in results.items()
    }
    most = max(float(values.max()) for values in ranks.values())
    for axis, (name, values) in zip(axes[1:], ranks.items(), strict=True):
        image = axis.imshow(values.T, aspect="auto", interpolation="nearest", vmin=0, vmax=most)
        axis.set(title=f"{name}: rows of each rank over the mean", ylabel="rank")
        figure.colorbar(image, ax=axis)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=80)


def read_trace(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A recorded trace, or an end with a message."""
    try:
        return load_trace(path)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def make_workload(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Counts of a made-up workload with as many ranks and experts as the committed traces, and contiguous owners."""
    try:
        counts = make(name, steps=100, layers=2, ranks=8, experts=32, rows=1024)
    except ValueError as error:
        raise SystemExit(f"--workload: {error}") from None
    return counts, np.tile(np.repeat(np.arange(8), 4), (2, 1))


def rivals(replicas: int) -> dict[str, Policy]:
    """Other systems' policies; see ``benchmarks.policies``."""
    return {
        "FasterMoE": FasterMoE(),
        "SmartMoE": SmartMoE(),
        "FlexMoE": FlexMoE(replicas=replicas),
        "LAER": Laer(replicas=replicas),
        "post-gate": PostGate(replicas=replicas),
    }


# Steps of a cell before any are counted, and workloads that are not recorded.
WARM_UP, MADE = 10, ("zipf", "drift", "burst", "balanced")


def play_cell(
    name: str, policies: dict[str, Policy], *, seed: int = 0, workloads: tuple[str, ...] | None = None
) -> dict[str, dict[str, Replay]]:
    """A cell of ``benchmarks.compare``: workload -> policy -> what it made of it.

    Args:
        seed: of made-up workloads.
    """
    cell = store.load(COMMITTED).get(name)
    if cell is None:
        raise SystemExit(f"--cell {name}: no compare.{name}.json; python -m benchmarks.compare measures cells")
    rates = Rates(**cell["launches"][-1]["rates"])
    shape, ranks = shapes.SHAPES[cell["cell"]["shape"]], shapes.WORLD_SIZE
    topology = Topology.even(ranks, shapes.RANKS_PER_NODE)
    sizes = LayerSizes(
        row_flops=6 * shape.hidden * shape.ffn, row_bytes=4 * shape.hidden, expert_bytes=shape.expert_bytes
    )
    owners = np.tile(np.repeat(np.arange(ranks), shape.experts // ranks), (shape.layers, 1))
    found: dict[str, dict[str, Replay]] = {}
    for workload in workloads or (*RECORDED, *MADE):
        if workload in RECORDED:
            counts, _ = load_trace(TRACES / f"{workload}.npz")
            if counts.shape[3] != shape.experts:
                continue
            counts = scale(counts[:, : shape.layers], shape.rows)
        else:
            counts = make(
                workload,
                steps=STEPS,
                layers=shape.layers,
                ranks=ranks,
                experts=shape.experts,
                rows=shape.rows,
                seed=seed,
            )
        found[workload] = {
            system: replay(
                counts,
                owners,
                copy.deepcopy(policy),
                topology,
                rates=rates,
                sizes=[sizes] * shape.layers,
                keeps_states=isinstance(policy, FlexMoE),
            )
            for system, policy in policies.items()
        }
    return found


def print_cell(name: str, found: dict[str, dict[str, Replay]]) -> None:
    """Predicted milliseconds of every policy, the share of moves in brackets."""
    systems = list(next(iter(found.values())))
    table = Table("workload", *systems, title=f"{name}: predicted ms per layer and step (of it moves between steps)")
    for workload, results in found.items():
        table.add_row(
            workload,
            *(f"{r.mean_seconds(WARM_UP) * 1e3:.0f} ({r.moves.mean() * 1e3:.0f})" for r in results.values()),
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", help="a file that hecate.record wrote")
    parser.add_argument("--workload", help="made-up routing instead: see hecate_compile/simulator/workloads.py")
    parser.add_argument("--cell", action="append", help="shape and links of benchmarks.compare; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the workloads of --cell")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of equal size that the ranks are on")
    parser.add_argument("--replicas", type=int, default=2, help="most replicas on a rank")
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--reshard-every", type=int, help="by default 50 steps, and 100 for the paper's rule")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--cluster", choices=sorted(CLUSTERS), default="a", help="speed of links and GPUs")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="rows per rank are scaled to this many tokens, top 2"
    )
    parser.add_argument("--rivals", action="store_true", help="the policies of other systems too")
    parser.add_argument("--png", type=Path, help="draw heat maps of --layer into this file")
    parser.add_argument("--layer", type=int, default=0)
    args = parser.parse_args()
    if sum(given is not None for given in (args.trace, args.workload, args.cell)) != 1:
        parser.error("give a trace, --workload or --cell, one of them")
    if args.cell:
        played = {
            "static": Static(),
            "hecate": Hecate(replicas=args.replicas),
            "paper": Hecate(objective="paper", replicas=args.replicas, reshard_every=100),
            **rivals(args.replicas),
        }
        for name in args.cell:
            print_cell(name, play_cell(name, played, seed=args.seed))
        return
    counts, owners = read_trace(args.trace) if args.trace is not None else make_workload(args.workload)
    steps, layers, ranks, experts = counts.shape
    if args.nodes < 1 or ranks % args.nodes or not 0 <= args.layer < layers:
        parser.error(f"the trace has {ranks} ranks, which --nodes must divide, and {layers} layers")
    scale = max(1, round(2 * args.tokens * steps * layers * ranks / max(1, counts.sum())))
    topology = Topology.even(ranks, ranks // args.nodes)
    options: dict[str, Any] = dict(replicas=args.replicas, window=args.window)
    every = args.reshard_every
    policies: dict[str, Policy] = {
        "static": Static(),
        "hecate, paper": Hecate(objective="paper", reshard_every=100 if every is None else every, **options),
        "hecate, time": Hecate(calibrates=args.calibrate, reshard_every=50 if every is None else every, **options),
    }
    if args.rivals:
        policies |= rivals(args.replicas)
    results = {
        name: replay(
            counts * scale,
            owners,
            policy,
            topology,
            rates=CLUSTERS[args.cluster],
            sizes=[SIZES] * layers,
            keeps_states=isinstance(policy, FlexMoE),
        )
        for name, policy in policies.items()
    }
    table = Table(
        "policy",
        "max/mean rows",
        "99th percentile",
        "replicas",
        "GB of experts",
        "rows that leave their node",
        "owners changed",
        "predicted ms",
        "of it moves",
        "static takes",
        title=f"{args.workload or args.trace.name}: {steps} steps, {layers} layers, {ranks} ranks on {args.nodes} "
        f"node(s), {experts} experts, rows x {scale}; per layer and step",
    )
    static = results["static"].mean_seconds()
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.imbalance.mean():.3f}",
            f"{np.percentile(result.imbalance, 99):.3f}",
            f"{result.replicas.mean():.1f}",
            f"{2 * result.replicas.mean() * SIZES.expert_bytes / 1e9:.3f}",
            f"{result.crossing.sum() / max(1, result.rows.sum()):.0%}",
            str(result.moved),
            f"{result.mean_seconds() * 1e3:.2f}",
            f"{result.moves.mean() * 1e3:.2f}",
            f"{static / result.mean_seconds():.2f} times as long",
        )
    Console(width=150).print(table)
    if args.png:
        draw(args.png, counts, results, args.layer)
        print(args.png)


if __name__ == "__main__":
    main()
