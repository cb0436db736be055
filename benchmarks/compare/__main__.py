"""The command line; see ``benchmarks.compare``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.compare import report, shapes
from benchmarks.compare.cells import BOUNDS, EXTERNAL, ON_ENGINE, Cell, full, short
from benchmarks.emulator.launch import Cluster, run
from benchmarks.emulator.self_test import self_test
from benchmarks.results_folder import results_folder

HERE = Path(__file__).parent


def calibrate() -> float:
    """Seconds of GPT-MoE-S's attention, forward, per layer, on a rank with its quota while all ranks compute."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        cluster = Cluster(nodes=shapes.NODES, ranks=shapes.RANKS_PER_NODE, cores=shapes.CORES)
        if run(cluster, [str(HERE / "calibrate.py"), str(out)], timeout=120) != 0:
            raise SystemExit("compare: the calibration failed")
        attention: float = json.loads(out.read_text())["attention"]
        return attention


def cluster_of(cell: Cell, attention: float) -> Cluster:
    """Nodes, quotas and links."""
    rate = shapes.link_rate(shapes.LINKS[cell.link], attention)
    return Cluster(nodes=shapes.NODES, ranks=shapes.RANKS_PER_NODE, cores=shapes.CORES, between_nodes=rate)


def run_cell(cell: Cell, attention: float, timeout: float) -> dict[str, Any]:
    """All systems and workloads of one shape on one link."""
    cluster = replace(cluster_of(cell, attention), quota_by_script=True)
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "cell.json", Path(folder) / "out.json"
        given.write_text(json.dumps(cell.as_json() | {"attention": attention}))
        try:
            code = run(cluster, [str(HERE / "rank.py"), str(given), str(out)], timeout=timeout)
        except TimeoutError as error:
            raise SystemExit(f"compare: {cell.name}: {error} in {timeout:.0f} s (--timeout)") from None
        if code != 0 or not out.exists():
            raise SystemExit(f"compare: {cell.name} failed")
        found: dict[str, Any] = json.loads(out.read_text())
    return {"cell": cell.as_json(), "link": cluster.between_nodes, "attention": attention, **found}


def environment(*, skipped: bool) -> dict[str, Any]:
    """Machine and versions."""
    return {
        "cpu cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version(),
        "torch": version("torch"), "transformers": version("transformers"), "ranks": shapes.WORLD_SIZE,
        "nodes": shapes.NODES, "cores per rank": shapes.CORES, "seed": 0, "self-test": not skipped,
        "command": " ".join(["python -m benchmarks.compare", *sys.argv[1:]]),
    }  # fmt: skip


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, expected at least 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all shapes, links, workloads and systems")
    parser.add_argument("--cell", action="append", help="only these cells, such as gpt-moe-s.a")
    parser.add_argument("--systems", help=f"only these, with commas: {', '.join((*ON_ENGINE, *EXTERNAL, *BOUNDS))}")
    parser.add_argument("--workloads", help="only these, with commas")
    parser.add_argument("--rounds", type=_positive, help="steps of every system in each workload")
    parser.add_argument("--report", action="store_true", help="make tables and plots from the samples on disk")
    parser.add_argument("--no-self-test", action="store_true", help="trust the emulator")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for each cell")
    args = parser.parse_args()
    if args.report:
        report.write(results_folder())
        return
    cells = [cell.change(args.systems, args.workloads, args.rounds) for cell in (full() if args.full else short())]
    if args.cell:
        unknown = set(args.cell) - {cell.name for cell in cells}
        if unknown:
            parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(cell.name for cell in cells)}")
        cells = [cell for cell in cells if cell.name in args.cell]
    attention = calibrate()
    print(f"a layer's attention takes {attention * 1e3:.1f} ms", flush=True)
    tested = set() if not args.no_self_test else {cell.link for cell in cells}
    for cell in cells:
        if cell.link not in tested and self_test(cluster_of(cell, attention)) != 0:
            raise SystemExit("compare: the emulator is off by more than it may be; nothing was measured")
        tested.add(cell.link)
        start = time.perf_counter()
        found = {"environment": environment(skipped=args.no_self_test), **run_cell(cell, attention, args.timeout)}
        target = results_folder() / f"compare.{cell.name}.json"
        target.write_text(json.dumps(found) + "\n")
        print(f"{target.name}: {time.perf_counter() - start:.0f} s", flush=True)
    report.write(results_folder())


if __name__ == "__main__":
    main()
