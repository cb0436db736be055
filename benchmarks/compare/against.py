"""Is Hecate faster than it was? This checkout beside a former commit, launch by launch, on the emulated cluster.

    python -m benchmarks.compare.against COMMIT                       three launches of gpt-moe-s.a each
    python -m benchmarks.compare.against COMMIT --cell modern.a --workloads zipf,balanced --launches 5 --auto

The former commit runs its own code, engine and benchmark, in a checkout of its own, on the same links. Launches take
turns, and every second pair in the other order. Both time the steps that the former draws. A line is the median over
pairs of launches, with their range; what one launch says is the median over its steps, without what moves between
them. The machine is not as fast in one launch as in the other: where both have timed a model that exchanges nothing
before steps or rounds, a column says what the ratio is when today's compute is taken to have been as fast as the
former's (that of a step on links of no time; what a step takes beyond that is left as it is). That model does not run
on the engine today. In versions where it does, what made it faster there counts for nothing in this column. With
--auto there is a line more, of today's default, replicas="auto", against the former two replicas. Results go to
build/benchmarks/against.CELL.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.compare.__main__ import calibrate
from benchmarks.compare.cells import known
from benchmarks.compare.machine import pace_of
from benchmarks.results_folder import results_folder

ROOT = Path(__file__).parents[2]
SYSTEMS = ("static EP", "hecate", "bound: free links")
# With --auto: what only today's version has, and what it is held against.
AUTO = {"hecate (auto)": "hecate"}
# Beside the systems of a workload: seconds of a model that exchanges nothing.
PACE = "pace"
_LAUNCH = """
import json, sys
from benchmarks.compare.__main__ import run_cell
from benchmarks.compare import cells
name, systems, workloads, rounds, attention, timeout, steps, out = json.loads(sys.argv[1])
# Former commits have all cells in full.
(cell,) = [cell for cell in getattr(cells, "known", cells.full)() if cell.name == name]
# Former commits cannot be told which.
found = run_cell(cell.change(systems, workloads, rounds), attention, timeout, **({"steps": steps} if steps else {}))
with open(out, "w") as file:
    json.dump(found, file)
"""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A folder with the files of ``commit``, while the block runs.

    Raises:
        SystemExit: git knows no such commit.
    """
    with tempfile.TemporaryDirectory(prefix="hecate-against-") as folder:
        tree = Path(folder) / "tree"
        made = subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, capture_output=True, text=True
        )
        if made.returncode != 0:
            raise SystemExit(f"against: no checkout of {commit}: {made.stderr.strip()}")
        try:
            # Where the package is found before the installed one.
            (Path(folder) / "path").mkdir()
            (Path(folder) / "path" / "hecate").symlink_to(tree / "hecate_compile")
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def launch(tree: Path, given: Sequence[Any]) -> dict[str, Any]:
    """One launch of a cell with the code in ``tree``.

    Args:
        given: cell, systems, workloads, rounds, seconds of attention, seconds that it may take, steps by workload.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        paths = [str(tree.parent / "path"), str(tree)] if tree != ROOT else [str(tree)]
        subprocess.run(
            [sys.executable, "-c", _LAUNCH, json.dumps([*given, str(out)])],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            check=True,
        )
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def steps_of(found: dict[str, Any]) -> dict[str, list[int]]:
    """The steps that a launch timed: workload -> steps."""
    return {
        workload: [sample["step"] for sample in next(iter(systems.values()))]
        for workload, systems in found["samples"].items()
    }


def medians(found: dict[str, Any], steps: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
    """Seconds of a step: workload -> system -> median over those of ``steps``; and the pace, if it was measured."""
    paces = found.get("pace", {})
    return {
        workload: {
            name: statistics.median(s["seconds"] for s in samples if s["step"] in steps[workload])
            for name, samples in systems.items()
        }
        | ({PACE: pace_of(paces[workload])} if paces.get(workload) else {})
        for workload, systems in found["samples"].items()
    }


def lines_of(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """A table: how many times as fast it is now, and what share of the time would remain on links of no time.

    Args:
        pairs: of every pair of launches the former medians and those of today.
    """
    lines = [
        "| workload | system | now, s | times as fast as before, median (range) | at equal pace | free links / now |",
        "|---|---|---|---|---|---|",
    ]
    ours, ours_paced = [], []
    for workload in pairs[0][1]:
        for system in (*SYSTEMS[:2], *(name for name in AUTO if name in pairs[0][1][workload])):
            was = AUTO.get(system, system)
            ratios = [before[workload][was] / now[workload][system] for before, now in pairs]
            seconds = statistics.median(now[workload][system] for _, now in pairs)
            share = statistics.median(now[workload][SYSTEMS[2]] / now[workload][system] for _, now in pairs)
            paced = [at_equal_pace(before[workload], now[workload], system) for before, now in pairs]
            told = [ratio for ratio in paced if ratio is not None]
            if system == SYSTEMS[1]:
                ours.append(statistics.median(ratios))
                ours_paced += [statistics.median(told)] if told else []
            shown = f"{share:.0%}" if system != SYSTEMS[0] else ""
            line = (workload, system, f"{seconds:.3f}", _spread(ratios), _spread(told), shown)
            lines.append(f"| {' | '.join(line)} |")
    lines.append(f"\nhecate, geometric mean of these medians: {statistics.geometric_mean(ours):.3f}")
    if ours_paced:
        lines[-1] += f", at equal pace {statistics.geometric_mean(ours_paced):.3f}"
    return lines


def at_equal_pace(before: Mapping[str, float], now: Mapping[str, float], system: str) -> float | None:
    """How many times as fast a system of Hecate is, had the machine been as fast in both launches.

    Args:
        before, now: of one workload, from :func:`medians`.

    Returns:
        None if a launch has no pace, or the system waits for more than its links.
    """
    if system == SYSTEMS[0] or PACE not in before or PACE not in now:
        return None
    compute = now[SYSTEMS[2]]
    return before[AUTO.get(system, system)] / (now[system] - compute + compute * before[PACE] / now[PACE])


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})" if ratios else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--cell", default="gpt-moe-s.a", choices=[cell.name for cell in known()], metavar="CELL")
    parser.add_argument("--workloads", default="natural,zipf,balanced")
    parser.add_argument("--auto", action="store_true", help="today's default as well")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each launch")
    args = parser.parse_args()
    pairs = []
    with checkout(args.commit) as former:
        attention = calibrate()
        shared = (args.workloads, args.rounds, attention, args.timeout)
        systems = {former: SYSTEMS, ROOT: (*SYSTEMS, *AUTO) if args.auto else SYSTEMS}
        steps: dict[str, list[int]] | None = None
        for number in range(args.launches):
            found = {}
            for tree in (former, ROOT) if number % 2 == 0 else (ROOT, former):
                given = steps if tree == ROOT else None
                found[tree] = launch(tree, (args.cell, ",".join(systems[tree]), *shared, given))
                # The first launch of all is the former's.
                steps = steps or steps_of(found[former])
            # A former version ended a workload when its time was up.
            both = {
                name: [s for s in steps_of(found[former])[name] if s in steps_of(found[ROOT])[name]] for name in steps
            }
            pairs.append((medians(found[former], both), medians(found[ROOT], both)))
            print(f"pair {number + 1} of {args.launches}", *lines_of(pairs[-1:]), sep="\n", flush=True)
    told = {"commit": args.commit, "cell": args.cell, "attention": attention, "pairs": pairs}
    (results_folder() / f"against.{args.cell}.json").write_text(json.dumps(told) + "\n")
    print(f"\n{args.cell} against {args.commit}, {args.launches} pairs of launches", *lines_of(pairs), sep="\n")


if __name__ == "__main__":
    main()
