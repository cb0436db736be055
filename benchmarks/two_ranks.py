"""Run a benchmark's module again, under torchrun on two ranks, or on more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def is_rank() -> bool:
    """Whether this process is one of them."""
    return "RANK" in os.environ


def run_on_two_ranks(module: str, *, timeout: float) -> None:
    """Run ``module`` with this process's command line; see :func:`run_on_ranks`."""
    run_on_ranks(module, 2, timeout=timeout)


def run_on_ranks(module: str, ranks: int, *, timeout: float) -> None:
    """Run ``module`` with this process's command line.

    Raises:
        subprocess.CalledProcessError: a rank failed.
        subprocess.TimeoutExpired: after ``timeout`` seconds; the ranks are ended.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--module",
        module,
        *sys.argv[1:],
    ]
    root = Path(__file__).parents[1]
    subprocess.run(command, check=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=timeout)
