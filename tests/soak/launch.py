"""Start a run and wait until it, its agent and all its ranks are gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.soak.worker import train
from tests.support.ranks import ROOT, _context, lives


class StillRunning(AssertionError):
    """A process outlived its run."""


def run(size: int, arguments: dict[str, Any], *, timeout: float = 120) -> int:
    """The exit code of the agent, negative if it was killed.

    Raises:
        StillRunning: a process did not end.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    process = _context.Process(target=_agent, args=(size, arguments))
    process.start()
    try:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise StillRunning(f"no end after {timeout:g} s")
        return process.exitcode
    finally:
        _all_gone(Path(arguments["notes"]))


def _agent(size: int, arguments: dict[str, Any]) -> None:
    """That of torchrun, which starts all ranks again, once, if one fails. They are forked, which takes no imports."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def rank() -> None:
        train(**arguments)

    os.chdir(ROOT)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        max_restarts=1,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        logs_specs=DefaultLogsSpecs(log_dir=arguments["notes"], redirects=Std.ALL),
    )
    elastic_launch(config, rank)()


def _all_gone(notes: Path, patience: float = 15.0) -> None:
    """Wait until no rank of the run is left; kill and report those that are."""
    pids = [int(path.read_text()) for path in notes.glob("rank*.pid")]
    end = time.monotonic() + patience
    while (left := list(filter(lives, pids))) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        raise StillRunning(f"processes {left} were still there {patience:g} s after their agent")
