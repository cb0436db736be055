"""Run a function on several ranks under torchrun, with a timeout that ends all of them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class RanksFailed(AssertionError):
    """A rank failed or the run timed out; the message holds the end of the output."""


def run_ranks(
    function: str, world_size: int, *, timeout: float = 300, env: dict[str, str] | None = None, **arguments: Any
) -> list[Any]:
    """Call ``module:function(**arguments)`` on every rank; returns the JSON-able results in rank order.

    Args:
        timeout: seconds; then every process of the run is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
            "--module", "tests.ranks", function, folder, json.dumps(arguments),
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | (env or {})
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise RanksFailed(
                f"{function} on {world_size} ranks: no end after {timeout} s\n{output[-20000:]}"
            ) from None
        if process.returncode != 0:
            raise RanksFailed(f"{function} on {world_size} ranks failed\n{output[-20000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]


def _main() -> None:
    import torch
    import torch.distributed as dist

    name, folder, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    rank = int(os.environ["RANK"])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
