"""How long ``hecate bisect examples/train.py`` takes to find a fault in a pass, for every pass.

    python -m benchmarks.bisect_faults                            all, half an hour
    python -m benchmarks.bisect_faults --passes schedule rematerialize

A fault is planted into the pass by name: it still does its work, and then scales what the graph returns by 1.01.
Written are seconds, and whether the pass was named; the exit code is 1 if one was not, or took more than 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import hecate.graph.backend
import hecate.graph.lowering
from benchmarks.results_folder import results_folder
from hecate.commands.bisect import NAMES
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES
from hecate.passes.fx import calls
from hecate.runtime.ops.gradients import replicate_bucket

ROOT = Path(__file__).parents[1]
LIMIT = 300.0
# Where the engine reads its passes, in the order in which they run.
_TABLES: tuple[tuple[str, Any, str], ...] = (
    ("captured", hecate.graph.backend, "PASSES"),
    ("joint", hecate.graph.lowering, "JOINT_PASSES"),
    ("final", hecate.graph.lowering, "FINAL_PASSES"),
)
SCRIPT = """
import runpy

from benchmarks.bisect_faults import plant, {fault}

plant({name!r}, {fault})
build = runpy.run_path({example!r})["build"]
"""

Fault = Callable[[GraphModule], None]


def plant(name: str, fault: Fault) -> None:
    """In this process the first pass of this name does ``fault`` to the graph behind its own work."""
    for _, module, table in _TABLES:
        passes = getattr(module, table)
        right = next((one for one in passes if one.__name__ == name), None)
        if right is None:
            continue

        def planted(gm: GraphModule, context: Any, right: Any = right) -> Any:
            outcome = right(gm, context)
            fault(gm)
            return outcome

        planted.__name__, planted.__module__ = name, right.__module__
        setattr(module, table, tuple(planted if one is right else one for one in passes))
        return
    raise ValueError(f"no pass {name!r}")


def scale_outputs(gm: GraphModule) -> None:
    """What the graph returns becomes 1.01 times as large."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        key = "val" if "val" in node.meta else "example_value"
        value = node.meta.get(key)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            target = torch.ops.aten.mul.Tensor if key == "val" else torch.mul
            with gm.graph.inserting_after(node):
                scaled = gm.graph.call_function(target, (node, 1.01))
            scaled.meta[key] = value
            output.replace_input_with(node, scaled)


def forget_a_mean(gm: GraphModule) -> None:
    """One dense parameter keeps this rank's own gradient, and what is averaged for it is nothing.

    Without the all-reduce its mean would be made up for when the backward ends (``training/outside_gradients.py``).
    """
    bucket = next(node for node in gm.graph.nodes if calls(node, replicate_bucket))
    part = next(user for user in bucket.users if user.args[1] == 0)
    readers = list(part.users)
    with gm.graph.inserting_after(part):
        nothing = gm.graph.call_function(torch.mul, (part, 0.0))
    with gm.graph.inserting_after(nothing):
        own = gm.graph.call_function(torch.add, (nothing, bucket.args[0][0]))
    nothing.meta, own.meta = dict(part.meta), dict(part.meta)
    for reader in readers:
        reader.replace_input_with(part, own)


def places_of(name: str) -> list[str]:
    """Which tables have the pass."""
    tables = {"captured": PASSES, "joint": JOINT_PASSES, "final": FINAL_PASSES}
    return [place for place, passes in tables.items() if name in {one.__name__ for one in passes}]


def find(name: str, fault: Fault = scale_outputs) -> dict[str, Any]:
    """Plant a fault and look for it."""
    with tempfile.TemporaryDirectory(prefix="hecate-faults-") as folder:
        script = Path(folder) / "planted.py"
        script.write_text(SCRIPT.format(name=name, fault=fault.__name__, example=str(ROOT / "examples" / "train.py")))
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "hecate.cli", "bisect", str(script), "--ranks", "2"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
    found = done.returncode == 1 and f"\n{name} changes the result" in done.stdout
    return {
        "pass": name,
        "in": places_of(name)[0],
        "found": found,
        "seconds": round(seconds, 1),
        "runs": done.stdout.count(": loss ") + done.stdout.count(": no result"),
        "said": "" if found else done.stdout + done.stderr,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    args = parser.parse_args()
    results = []
    for name in args.passes:
        results.append(find(name))
        one = results[-1]
        print(f"{name} ({one['in']}): {'found' if one['found'] else 'NOT FOUND'}, {one['seconds']} s", flush=True)
        if not one["found"]:
            print(one["said"])
    target = results_folder() / "bisect_faults.json"
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(target)
    return int(not all(one["found"] and one["seconds"] <= LIMIT for one in results))


if __name__ == "__main__":
    sys.exit(main())
