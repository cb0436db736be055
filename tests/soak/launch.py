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

from tests.support.ranks import ROOT, _context

# By which all processes of a run are found.
_MARK = "HECATE_SOAK"


class StillRunning(AssertionError):
    """A process outlived its run."""


def run(size: int, arguments: dict[str, Any], *, launcher: str, timeout: float = 120) -> int:
    """The exit code of the agent, negative if it was killed.

    Args:
        launcher: "torchrun", or "fork" for a small agent that does the same in a second.

    Raises:
        StillRunning: a process did not end.
    """
    mark = os.urandom(8).hex()
    start = _torchrun if launcher == "torchrun" else _fork
    try:
        return start(size, arguments, mark, timeout)
    finally:
        _all_gone(mark)


def _torchrun(size: int, arguments: dict[str, Any], mark: str, timeout: float) -> int:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(size),
        "--max-restarts",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--monitor-interval",
        "0.1",
        "-m",
        "tests.soak.worker",
        json.dumps(arguments),
    ]
    environment = os.environ | {_MARK: mark, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output.seek(0)
            raise StillRunning(f"no end after {timeout:g} s: {output.read()[-4000:].decode()}") from None


# --- the small agent ---


def _fork(size: int, arguments: dict[str, Any], mark: str, timeout: float) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    process = _context.Process(target=_agent, args=(size, arguments, mark))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise StillRunning(f"no end after {timeout:g} s")
    return process.exitcode


def _agent(size: int, arguments: dict[str, Any], mark: str) -> None:
    """Starts ranks, starts all of them again once if one fails, and ends when they do; as torchrun."""
    import torch.distributed as dist

    os.chdir(ROOT)
    for restart in range(2):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = {_start_rank(rank, size, restart, store.port, arguments, mark): rank for rank in range(size)}
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


def _start_rank(rank: int, size: int, restart: int, port: int, arguments: dict[str, Any], mark: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    # Whatever happens, this process must not go on as a second agent.
    try:
        log = os.open(Path(arguments["notes"], f"rank{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": mark,
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            _MARK: mark,
        }
        from tests.soak.worker import train

        train(**arguments)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _all_gone(mark: str, patience: float = 15.0) -> None:
    """Wait until no process of the run is left; kill and report those that are."""
    end = time.monotonic() + patience
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        raise StillRunning(f"processes {left} were still there {patience:g} s after their agent")


def _marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (path / "environ").read_bytes() and "Z" not in _state(path):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _state(path: Path) -> str:
    return (path / "stat").read_text().rpartition(")")[2].split()[0]
