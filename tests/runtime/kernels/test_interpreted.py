"""The cases of the kernels, in a process in which Triton interprets them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.kernels.ranks import MODELS
from tests.support.extent import ALL
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]
HAS_TRITON = importlib.util.find_spec("triton") is not None

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which is for Linux")


# Thousands of cases with HECATE_TESTS=all.
SECONDS = 2400 if ALL else 300


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_kernels_equal_their_references() -> None:
    # Nothing else runs beside a slow test, and the interpreter has one thread.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    # Options and the worker's name of this run are not for that one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "tests/runtime/kernels/cases"],
        cwd=ROOT,
        env=kept | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    assert "skipped" not in done.stdout and " passed" in done.stdout, done.stdout[-500:]


MOVING = {"expand_segments", "gather_rows", "pack_experts", "scatter_rows", "sum_replicas"}
# bf16 has 8 bits, and the interpreter cuts off the others where torch rounds: neighbours differ by up to 2^-7, and
# sums of rows by a few of those.
ROUNDED = 5e-2


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Not forked: those processes have imported Triton before.
        return run_ranks("tests.runtime.kernels.ranks:run", 3, launcher="torchrun")


@pytest.mark.distributed
def test_operators_on_ranks_that_interpret_kernels(ranks: list[dict[str, Any]]) -> None:
    """Replicas, their gradients and rows between three ranks."""
    assert {name for of_rank in ranks for name in of_rank["launched by operators"]} == MOVING


@pytest.mark.distributed
@pytest.mark.parametrize("model", MODELS)
def test_a_step_with_kernels_equals_one_without(model: str, ranks: list[dict[str, Any]]) -> None:
    """Loss and every gradient, with random replicas."""
    limit = ROUNDED if "bf16" in model else 1e-5
    # A rank need not send experts.
    launched = {name for of_rank in ranks for name in of_rank[model]["launched"]}
    assert launched == MOVING | {"grouped_mm", "weight_grads"}
    for of_rank in ranks:
        found = of_rank[model]
        assert not found["missing"] and "loss" in found["errors"]
        assert max(found["errors"].values()) < limit, found["errors"]
        assert found["one process"] < limit
