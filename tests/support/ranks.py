"""Run a function on several ranks under torchrun, with a timeout that ends all of them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class RanksFailed(AssertionError):
    """A rank failed or the run timed out; the message holds the end of the output."""


def message_of(function: Callable[[], object]) -> str:
    """What ``function`` raises, as ``"Kind: message"``; or that it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_ranks(
    function: str, world_size: int, *, timeout: float = 300, env: dict[str, str] | None = None, **arguments: Any
) -> list[Any]:
    """Call ``module:function(**arguments)`` on every rank; returns the JSON-able results in rank order.

    Args:
        timeout: seconds; then every process of the run is killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
            "--module", "tests.support.ranks", function, name, json.dumps(arguments),
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | (env or {})
        # A file, not a pipe: a worker that outlives torchrun would keep a pipe open and its reader waiting.
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RanksFailed(f"{function} on {world_size} ranks: no end after {timeout} s\n{_tail(log)}") from None
        finally:
            _end(process, folder)
        if code != 0:
            raise RanksFailed(f"{function} on {world_size} ranks failed\n{_tail(log)}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _tail(log: Path) -> str:
    return log.read_text()[-20000:]


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Stop torchrun and its workers, which live in sessions of their own."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for path in folder.glob("pid*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _main() -> None:
    import torch
    import torch.distributed as dist

    name, folder, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    pid = Path(folder) / f"pid{rank}"
    pid.write_text(str(os.getpid()))
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # The number may belong to somebody else from now on.
    pid.unlink()


if __name__ == "__main__":
    _main()
