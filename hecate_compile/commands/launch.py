"""Run a module on several ranks that torchrun starts, and see to it that all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Seconds in which processes may end by themselves when they are asked to.
GRACE = 15.0


def run_ranks(
    module: str, arguments: Sequence[str], *, ranks: int, timeout: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run ``python -m module`` on each rank; return exit code (None after ``timeout`` seconds) and all output."""
    torchrun = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --module --nproc-per-node"
    launcher = [*torchrun.split(), str(ranks)] if ranks > 1 else ["-m"]
    command = [sys.executable, *launcher, module, *arguments]
    # A file, not a pipe: a rank that outlives torchrun would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=None if environment is None else dict(environment),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            # Needed if the user interrupts, too: in a session of its own the process does not get the signal.
            _end(process)
        log.seek(0)
        return code, log.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    if process.poll() is not None:
        return
    # torchrun gives every rank a session of its own, and nobody can tell whose they were once it is gone.
    started = _below(process.pid)
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:
        for pid in (*started, process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _below(pid: int) -> list[int]:
    """Return all processes that a process started, and those that they started."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
    return found[1:]
