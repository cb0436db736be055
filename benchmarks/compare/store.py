"""Launches of cells on disk: ``compare.CELL.json``."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.compare.cells import Cell

ROOT = Path(__file__).parents[2]
# What a sample depends on: the engine, and of the benchmark what ranks run.
_MEASURES = (
    "rank",
    "systems",
    "shipped",
    "variants",
    "moves",
    "waits",
    "routing",
    "shapes",
    "workloads",
    "machine",
    "calibrate",
)
_CODE = ("hecate_compile", "passes", "runtime", "benchmarks/policies", "benchmarks/emulator", "benchmarks/traces")
_KINDS = (".py", ".npz")
# Parts of these that no step of a launch runs, so that the simulator can be mended with the samples that show how.
# Workloads are made up with it; whether samples are of the same ones is a test (test_compare.py).
_NOT_RUN = (
    "hecate_compile/checkpoints",
    "hecate_compile/commands",
    "hecate_compile/reports",
    "hecate_compile/simulator",
)


def load(folder: Path) -> dict[str, Any]:
    """What was measured: name of a cell -> its ``cell`` and its ``launches``, the last of which has timelines."""
    return {
        path.name[len("compare.") : -len(".json")]: json.loads(path.read_text())
        for path in sorted(folder.glob("compare.*.json"))
    }


def path_of(folder: Path, name: str) -> Path:
    """Where a cell is."""
    return folder / f"compare.{name}.json"


def seeds_of(folder: Path, cell: Cell, code: str) -> list[int]:
    """Of the launches of ``cell`` that are there to be added to, the seeds, which number them from 0.

    Args:
        code: what :func:`code_digest` says now.

    Raises:
        SystemExit: those on disk have other systems, workloads, steps or code.
    """
    found = load(folder).get(cell.name)
    if found is None:
        return []
    same = found["cell"] == json.loads(json.dumps(cell.as_json()))
    if not same or any(launch["code"] != code for launch in found["launches"]):
        what = "code" if same else "options"
        raise SystemExit(
            f"compare: {path_of(folder, cell.name)} was measured with other {what}; without --continue it is replaced"
        )
    return [launch["seed"] for launch in found["launches"]]


def add(folder: Path, cell: Cell, launch: dict[str, Any], *, first: bool) -> Path:
    """Write a launch beside those that are there; the first one replaces what was there."""
    target = path_of(folder, cell.name)
    before = [] if first or not target.exists() else json.loads(target.read_text())["launches"]
    # Only the last one is drawn, and spans are most of a file.
    before = [{key: value for key, value in one.items() if key != "timelines"} for one in before]
    # A run that is cut off here leaves the old file.
    draft = target.with_suffix(".draft")
    draft.write_text(json.dumps({"cell": cell.as_json(), "launches": [*before, launch]}) + "\n")
    os.replace(draft, target)
    return target


def code_digest(root: Path = ROOT) -> str:
    """Equal for equal code that steps depend on; launches of different code are not of one table."""
    files = [path for folder in _CODE for path in sorted((root / folder).rglob("*.*")) if path.suffix in _KINDS]
    files = [path for path in files if not path.relative_to(root).as_posix().startswith(_NOT_RUN)]
    files += [root / "benchmarks" / "compare" / f"{name}.py" for name in _MEASURES]
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
