"""How long a layer's attention takes on a rank with its quota, while all the others compute too.

calibrate.py OUT.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.compare import shapes

WARM_UP, REPEATS = 3, 12


class NoExperts(nn.Module):
    """In the place of a layer's experts, so that attention is left."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = shapes.SHAPES["gpt-moe-s"]
    model = shapes.build(shape)
    for layer in model.model.layers:
        layer.mlp = NoExperts()
    ids = torch.zeros(shape.sequences, shape.sequence, dtype=torch.int64)
    times = []
    for index in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        model.model(input_ids=ids)
        if index >= WARM_UP:
            times.append((time.perf_counter() - start) / shape.layers)
    seconds = torch.tensor(statistics.median(times))
    dist.all_reduce(seconds)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({"attention": float(seconds) / dist.get_world_size()}))
    dist.barrier()


if __name__ == "__main__":
    main()
