"""The cases of the kernels, in a process in which Triton interprets them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]
HAS_TRITON = importlib.util.find_spec("triton") is not None

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which is for Linux")


@pytest.mark.slow
def test_kernels_equal_their_references() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Options and the worker's name of this run are not for that one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "tests/runtime/kernels/cases"], cwd=ROOT, env=kept | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    assert "skipped" not in done.stdout and " passed" in done.stdout, done.stdout[-500:]


@pytest.mark.distributed
def test_operators_on_ranks_that_interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, their gradients and rows between three ranks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Not forked: those processes have imported Triton before.
    ranks = run_ranks("tests.runtime.kernels.ranks:compare", 3, launcher="torchrun")
    launched = {name for of_rank in ranks for name in of_rank}
    assert launched == {"expand_segments", "gather_rows", "pack_experts", "scatter_rows", "sum_replicas"}
