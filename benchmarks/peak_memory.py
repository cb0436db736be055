"""What it costs in memory that Inductor must not reorder operators by estimated peak memory.

    python -m benchmarks.peak_memory            about 3 minutes on two cores

hecate.compile switches that reordering off at more than one rank, because it would move starts and waits
(docs/decisions.md). Here Inductor is asked for its own estimate of both orders, forward and backward, for a model of
four layers at two ranks: the order of the schedule, and the best that Inductor finds.
"""

from __future__ import annotations

import logging
import re
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.two_ranks import is_rank, run_on_two_ranks


class Estimates(logging.Handler):
    """Peak bytes that Inductor logs: of the order that it gets, and of those that it tries."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[list[int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"(\w+) peak memory: (\d+)", record.getMessage())
        if found and found.group(1) == "Baseline":
            self.graphs.append([])
        if found:
            self.graphs[-1].append(int(found.group(2)))


def run_rank() -> None:
    import torch._inductor.compile_fx as inductor
    import torch._inductor.memory as memory

    import hecate
    from benchmarks.compile_and_step import TOKENS, build_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    estimates = Estimates()
    memory.torch_log.addHandler(estimates)
    memory.torch_log.setLevel(logging.INFO)
    original = inductor.compile_fx

    def reordering(gm: Any, inputs: Any, **options: Any) -> Any:
        if "config_patches" in options:
            options["config_patches"] |= {"reorder_for_peak_memory": True, "fx_graph_cache": False}
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return original(gm, inputs, **options)

    mock.patch.object(inductor, "compile_fx", reordering).start()
    model = hecate.compile(build_model())
    ids = torch.randint(0, 512, TOKENS, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=ids, labels=ids).loss.backward()
    if dist.get_rank() == 0:
        for name, (scheduled, *others) in zip(("forward", "backward"), estimates.graphs, strict=False):
            best = min(scheduled, *others)
            print(
                f"{name}: schedule {scheduled / 1e6:.1f} MB, Inductor's best {best / 1e6:.1f} MB, "
                f"{scheduled / best - 1:.1%} more"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if is_rank():
        run_rank()
        return
    run_on_two_ranks("benchmarks.peak_memory", timeout=1200)


if __name__ == "__main__":
    main()
