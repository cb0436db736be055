"""Start a run and wait until it, its agent and all its ranks are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.ranks import ROOT, _context, environment_of, lives, torchrun


class StillRunning(AssertionError):
    """A process outlived its run."""


def run(size: int, arguments: dict[str, Any], *, launcher: str, timeout: float = 120) -> int:
    """The exit code of the agent, negative if it was killed.

    Args:
        launcher: "torchrun", or "fork" for a small agent that does the same in a second.

    Raises:
        StillRunning: a process did not end.
    """
    start = _torchrun if launcher == "torchrun" else _fork
    try:
        return start(size, arguments, timeout)
    finally:
        _all_gone(Path(arguments["notes"]))


def _torchrun(size: int, arguments: dict[str, Any], timeout: float) -> int:
    options = ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "tests.soak.worker"]
    command = [*torchrun(size), *options, json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output.seek(0)
            raise StillRunning(f"no end after {timeout:g} s: {output.read()[-4000:].decode()}") from None


# --- the small agent ---


def _fork(size: int, arguments: dict[str, Any], timeout: float) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    process = _context.Process(target=_agent, args=(size, arguments))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise StillRunning(f"no end after {timeout:g} s")
    return process.exitcode


def _agent(size: int, arguments: dict[str, Any]) -> None:
    """Starts ranks, starts all of them again once if one fails, and ends when they do; as torchrun."""
    import torch.distributed as dist

    os.chdir(ROOT)
    for restart in range(2):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = {_start_rank(rank, size, restart, store.port, arguments): rank for rank in range(size)}
        failed = False
        while ranks:
            pid, status = os.wait()
            ranks.pop(pid, None)
            if status and not failed:
                failed = True
                for other in ranks:
                    os.kill(other, signal.SIGTERM)
        if not failed:
            os._exit(0)
    os._exit(1)


def _start_rank(rank: int, size: int, restart: int, port: int, arguments: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # Whatever happens, this process must not go on as a second agent.
    try:
        log = os.open(Path(arguments["notes"], f"rank{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Runs on this machine are told apart by their folders.
        own = {"TORCHELASTIC_RUN_ID": arguments["notes"], "TORCHELASTIC_RESTART_COUNT": str(restart)}
        os.environ |= environment_of(rank, size, port) | own
        from tests.soak.worker import train

        train(**arguments)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


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
