"""The command line; see ``benchmarks.compare``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.compare import report, shapes, store
from benchmarks.compare.cells import LAUNCHES, NAMES, Cell, full, known, short
from benchmarks.emulator.launch import Cluster, run
from benchmarks.emulator.self_test import self_test
from benchmarks.results_folder import results_folder

HERE = Path(__file__).parent


def calibrate() -> float:
    """Seconds of GPT-MoE-S's attention, forward, per layer, on a rank with its quota while all ranks compute."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        cluster = Cluster(nodes=shapes.NODES, ranks=shapes.RANKS_PER_NODE, cores=shapes.CORES)
        if run(cluster, [str(HERE / "calibrate.py"), str(out)], timeout=600) != 0:
            raise SystemExit("compare: the calibration failed")
        attention: float = json.loads(out.read_text())["attention"]
        return attention


def cluster_of(cell: Cell, attention: float) -> Cluster:
    """Nodes, quotas and links."""
    rate = shapes.link_rate(shapes.LINKS[cell.link], attention)
    return Cluster(nodes=shapes.NODES, ranks=shapes.RANKS_PER_NODE, cores=shapes.CORES, between_nodes=rate)


def run_cell(
    cell: Cell, attention: float, timeout: float, *, seed: int = 0, steps: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Any]:
    """All systems and workloads of one shape on one link, in one launch.

    Args:
        seed: of what is drawn: steps that are timed, the turns that systems take, workloads that are made up.
        steps: those to time instead, by workload.
    """
    cluster = replace(cluster_of(cell, attention), quota_by_script=True)
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "cell.json", Path(folder) / "out.json"
        given.write_text(json.dumps(cell.as_json() | {"attention": attention, "seed": seed, "steps": steps or {}}))
        try:
            code = run(cluster, [str(HERE / "rank.py"), str(given), str(out)], timeout=timeout)
        except TimeoutError as error:
            raise SystemExit(f"compare: {cell.name}: {error} in {timeout:.0f} s (--timeout)") from None
        if code != 0 or not out.exists():
            raise SystemExit(f"compare: {cell.name} failed")
        found: dict[str, Any] = json.loads(out.read_text())
    return {"cell": cell.as_json(), "link": cluster.between_nodes, "attention": attention, "seed": seed, **found}


def environment(*, skipped: bool) -> dict[str, Any]:
    """Machine and versions."""
    return {
        "cpu cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "ranks": shapes.WORLD_SIZE,
        "nodes": shapes.NODES,
        "cores per rank": shapes.CORES,
        "self-test": not skipped,
        "commit": _commit(),
        "command": " ".join(["python -m benchmarks.compare", *sys.argv[1:]]),
    }


def _commit() -> str:
    """Which one the checkout is at, for people."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.strip()


def chosen(names: Sequence[str] | None, *, everything: bool) -> list[Cell]:
    """The cells that the command line asks for.

    Raises:
        SystemExit: there is no such cell.
    """
    cells = full() if everything else short()
    if not names:
        return cells
    # Cells that are in no table unless asked for, too.
    there = {cell.name: cell for cell in (*known(), *cells)}
    unknown = set(names) - set(there)
    if unknown:
        raise SystemExit(f"compare: no cell {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    return [there[name] for name in dict.fromkeys(names)]


def order(cells: Sequence[Cell], done: Mapping[str, Collection[int]], launches: int) -> list[tuple[int, Cell]]:
    """Launches that are missing, by their numbers: the first of all cells, then the second of all.

    So what a run that is cut off leaves has about as many launches of each.

    Args:
        done: numbers of the launches that each cell has.
    """
    return [(number, cell) for number in range(launches) for cell in cells if number not in done[cell.name]]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, expected at least 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="five cells, about four hours")
    parser.add_argument(
        "--cell", action="append", help="only these, such as gpt-moe-s.a; also of those not in --full"
    )
    parser.add_argument("--systems", help=f"only these, with commas: {', '.join(NAMES)}")
    parser.add_argument("--workloads", help="only these, with commas")
    parser.add_argument("--rounds", type=_positive, help="steps of every system in each workload of a launch")
    parser.add_argument("--launches", type=_positive, default=LAUNCHES, help="of each cell")
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="resume",
        help="add the launches that are missing",
    )
    parser.add_argument("--report", action="store_true", help="make tables and plots from the samples on disk")
    parser.add_argument("--no-self-test", action="store_true", help="trust the emulator")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for each launch")
    args = parser.parse_args()
    folder = results_folder()
    if args.report:
        report.write(folder)
        return
    cells = [c.change(args.systems, args.workloads, args.rounds) for c in chosen(args.cell, everything=args.full)]
    code = store.code_digest()
    done = {cell.name: store.seeds_of(folder, cell, code) if args.resume else () for cell in cells}
    tested = set() if not args.no_self_test else {cell.link for cell in cells}
    for number, cell in order(cells, done, args.launches):
        start, said = time.perf_counter(), environment(skipped=args.no_self_test)
        if store.code_digest() != code:
            raise SystemExit("compare: the code was changed while it was measured; launches so far are on disk")
        # The machine is not as fast in every hour, and links must match it.
        attention = calibrate()
        what = f"{cell.name}, launch {number + 1} of {args.launches}"
        print(f"{what}: a layer's attention takes {attention * 1e3:.1f} ms", flush=True)
        if cell.link not in tested and self_test(cluster_of(cell, attention)) != 0:
            raise SystemExit("compare: the emulator is off by more than it may be; nothing was measured")
        tested.add(cell.link)
        found = run_cell(cell, attention, args.timeout, seed=number)
        del found["cell"]
        found = {"environment": said, "code": code, **found}
        found["took"] = time.perf_counter() - start
        target = store.add(folder, cell, found, first=number == 0 and not args.resume)
        print(f"{target.name}: {found['took']:.0f} s", flush=True)
    report.write(folder)


if __name__ == "__main__":
    main()
