"""The cases of the kernels, in a process in which Triton interprets them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import ALL

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
