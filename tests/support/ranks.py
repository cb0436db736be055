"""Run a function on several ranks, each a process of its own, with a timeout that ends all of them.

Ranks are forked from a server that has imported torch, transformers and hecate once, so a launch takes a fraction of
a second. ``launcher="torchrun"`` starts them as users do; a few tests do that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]

# What every rank would import anyway. Not the tests: they look at the rank's environment when they are imported.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.testing",
    "pytest",
    "hecate",
    "hecate.simulator",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("auto", "qwen3_moe", "mixtral", "olmoe")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("deepseek_v3", "gpt_oss")),
]
# In torch 2.11 it looks for GPUs when it is imported, and no process that is forked then may use one.
if not torch.cuda.is_available():
    _PRELOADED.append("torch._inductor.compile_fx")
# How long the others may take to notice, once one rank has failed.
_GRACE = 10.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


class RanksFailed(AssertionError):
    """A rank failed or the run timed out; the message holds its traceback, or the end of the output."""


def message_of(function: Callable[[], object]) -> str:
    """What ``function`` raises, as ``"Kind: message"``; or that it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_ranks(
    function: str | Callable[..., object],
    world_size: int,
    *,
    timeout: float = 300,
    grace: float = _GRACE,
    launcher: str = "fork",
    **arguments: Any,
) -> list[Any]:
    """Call ``function(**arguments)`` on every rank; returns the JSON-able results in rank order.

    Args:
        function: of a module that ranks can import, or its ``"module:name"``.
        timeout: seconds; then every process of the run is killed.
        grace: seconds that the other forked ranks have to end when one has failed.
        launcher: ``"fork"`` or ``"torchrun"``.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__qualname__}"
    folder = Path(tempfile.mkdtemp(prefix="hecate-ranks-"))
    try:
        if launcher == "fork":
            problem = _fork(function, world_size, timeout, grace, folder, arguments)
        else:
            problem = _torchrun(function, world_size, timeout, folder, arguments)
        found = [_read(folder / f"{rank}.json") for rank in range(world_size)]
        said = "\n".join(f"--- rank {rank}\n{one['error']}" for rank, one in enumerate(found) if "error" in one)
        if problem or said:
            where = f"{function} on {world_size} ranks"
            raise RanksFailed(f"{where}: {problem or 'failed'}\n{said}\n{_output(folder)}")
        return [one["result"] for one in found]
    finally:
        for path in folder.glob("pid*"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.killpg(int(path.read_text()), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return result


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a rank may be killed at any time."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def _output(folder: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-8000:]}" for log in sorted(folder.glob("*log")))


def lives(pid: int) -> bool:
    """Whether a process is there that has not ended, be it that nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- forked ranks ---


def _fork(
    function: str, world_size: int, timeout: float, grace: float, folder: Path, arguments: dict[str, Any]
) -> str:
    """Returns what went wrong, or nothing."""
    import torch.distributed as dist

    # Read when the server starts, which is with the first launch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        _context.Process(target=_rank, args=(function, rank, world_size, store.port, str(folder), arguments))
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        return _join(ranks, timeout, grace)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def _join(ranks: list[Any], timeout: float, grace: float) -> str:
    end, problem = time.monotonic() + timeout, ""
    running = list(ranks)
    while running and (left := end - time.monotonic()) > 0:
        wait([process.sentinel for process in running], left)
        running = [process for process in running if process.exitcode is None]
        failed = [number for number, process in enumerate(ranks) if process.exitcode]
        if failed and not problem:
            problem = f"rank {failed[0]} ended with {ranks[failed[0]].exitcode}"
            end = min(end, time.monotonic() + grace)
    if running and not problem:
        return f"no end after {timeout:g} s"
    return problem


def _rank(function: str, rank: int, world_size: int, port: int, folder: str, arguments: dict[str, Any]) -> None:
    """One rank, in a process group of its own, which is what ends with it."""
    os.setsid()
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    # As under torchrun: the store is there already.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    with _numbered(Path(folder), rank):
        code = _work(function, rank, Path(folder), arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by returning: threads that wait for a peer must not keep a rank that has failed.
    os._exit(code)


def _work(function: str, rank: int, folder: Path, arguments: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Tracing makes millions of objects that live on; looking for garbage among them takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    name, _, attribute = function.partition(":")
    try:
        result = {"result": getattr(importlib.import_module(name), attribute)(**arguments)}
        text = json.dumps(result)
    except BaseException:
        _write(folder / f"{rank}.json", json.dumps({"error": traceback.format_exc()}))
        return 1
    _write(folder / f"{rank}.json", text)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


# --- torchrun ---


def torchrun(processes: int) -> list[str]:
    """Return the command that starts so many processes on a port of their own; the program comes behind it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]


def _torchrun(function: str, world_size: int, timeout: float, folder: Path, arguments: dict[str, Any]) -> str:
    """Returns what went wrong, or nothing."""
    program = ["--module", "tests.support.ranks", function, str(folder), json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    options: Any = {"cwd": ROOT, "env": environment, "timeout": timeout}
    # A file, not a pipe: a worker that outlives torchrun would keep a pipe open and its reader waiting. Workers live
    # in sessions of their own and are ended by their numbers.
    with (folder / "torchrun.log").open("w") as output:
        try:
            command = [*torchrun(world_size), *program]
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, **options).returncode
        except subprocess.TimeoutExpired:
            return f"no end after {timeout:g} s"
    return f"torchrun ended with {code}" if code else ""


@contextlib.contextmanager
def _numbered(folder: Path, rank: int) -> Iterator[None]:
    path = folder / f"pid{rank}"
    path.write_text(str(os.getpid()))
    yield
    # The number may belong to somebody else from now on.
    path.unlink()


def _main() -> None:
    function, folder, arguments = sys.argv[1:]
    rank = int(os.environ["RANK"])
    with _numbered(Path(folder), rank):
        code = _work(function, rank, Path(folder), json.loads(arguments))
    sys.exit(code)


if __name__ == "__main__":
    _main()
