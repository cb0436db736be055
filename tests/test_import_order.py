"""Imports run one way, and nowhere in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"hecate.passes": "passes", "hecate.runtime": "runtime", "hecate": "hecate_compile"}

# The lowest room first. A module imports from its own room and from those above its line; rooms on one line do not
# know each other. A new room is one more line here and in docs/architecture.md.
ORDER: tuple[tuple[str, ...], ...] = (
    ("hecate.private",),
    ("hecate.runtime.placement",),
    ("hecate.runtime.comm",),
    ("hecate.runtime.state",),
    ("hecate.runtime.kernels",),
    ("hecate.runtime.ops",),
    ("hecate.runtime.one_sided", "hecate.runtime.attention"),
    ("hecate.runtime",),
    ("hecate.passes.base",),
    ("hecate.passes.fx",),
    ("hecate.passes.match",),
    ("hecate.passes.analysis",),
    ("hecate.passes.captured", "hecate.passes.joint", "hecate.passes.final"),
    ("hecate.passes.attention", "hecate.passes.eager"),
    ("hecate.passes.invariants", "hecate.passes.fingerprint"),
    ("hecate.passes.dumps",),
    ("hecate.passes",),
    ("hecate.passes.runner",),
    ("hecate.config",),
    ("hecate.wrap",),
    ("hecate.graph",),
    ("hecate.training",),
    ("hecate.compiled_model",),
    ("hecate.checkpoints.safety",),
    ("hecate.checkpoints",),
    ("hecate.checkpoints.hub",),
    ("hecate.reports", "hecate.routing"),
    ("hecate.integrations",),
    ("hecate.checks",),
    ("hecate.found",),
    ("hecate.compilation", "hecate.api"),
    ("hecate",),
    ("hecate.simulator", "hecate.lightning"),
    ("hecate.commands",),
    ("hecate.cli",),
)


def modules() -> dict[str, Path]:
    """Every module by its dotted name; the links in hecate_compile are the folders that they lead to."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package == "hecate" and parts[0] in ("passes", "runtime"):
                continue
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imported_by(path: Path) -> Iterator[str]:
    """Modules of the project that a file names in an import, wherever in the file, also for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def room_of(module: str) -> str:
    """The longest name in the table that the module is or lies in; a package's own file is not its inner rooms."""
    rooms = [room for line in ORDER for room in line if module == room or module.startswith(f"{room}.")]
    room = max(rooms, key=len)
    inner = module != room and room in ("hecate", "hecate.passes", "hecate.runtime")
    assert not inner, f"{module} is in no room of the table"
    return room


LINE = {room: number for number, line in enumerate(ORDER) for room in line}


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    room = room_of(module)
    for other in imported_by(MODULES[module]):
        theirs = room_of(other)
        assert theirs == room or LINE[theirs] < LINE[room], f"{module} must not import {other}"


def test_no_import_circle() -> None:
    graph = {module: set(imported_by(path)) - {module} for module, path in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_every_room_exists() -> None:
    for room in LINE:
        assert room in MODULES or any(module.startswith(f"{room}.") for module in MODULES), room


def test_the_bottom_room_knows_no_rank_and_no_device() -> None:
    """The planner is integers, and so are patterns: what they say cannot depend on who asks, when, or where."""
    for module, path in MODULES.items():
        whole_numbers = ("hecate.runtime.attention.pattern", "hecate.runtime.attention.options")
        if module.startswith(("hecate.runtime.placement.", *whole_numbers)):
            for name in ("import torch", "from torch", "import time", "import random"):
                assert name not in path.read_text(), f"{module}: {name}"
