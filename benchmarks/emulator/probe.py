"""What a rank of the self-test does: work of different amounts before a barrier, and transfers."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

# Seconds of CPU time of the mean rank, and repeats.
UNIT, REPEATS = 0.06, 5
BYTES = 8_000_000


def burn(seconds: float) -> None:
    """Use CPU time."""
    end = time.thread_time() + seconds
    a = torch.ones(64, 64)
    while time.thread_time() < end:
        a @ a


def barrier_seconds(work: float) -> float:
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        burn(work * UNIT)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def send_seconds(source: int, destination: int) -> float:
    """One rank sends to another; the others wait."""
    data = torch.zeros(BYTES, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    if dist.get_rank() == source:
        dist.send(data, destination)
    elif dist.get_rank() == destination:
        dist.recv(data, source)
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    half = size // 2
    found = {
        "seconds": {name: barrier_seconds(work[rank]) for name, work in json.loads(sys.argv[1]).items()},
        "rates": {
            "there": BYTES / send_seconds(0, half),
            "and back": BYTES / send_seconds(half, 0),
        },
        "inside": BYTES / send_seconds(0, 1),
    }
    if rank == 0:
        with open(sys.argv[2], "w") as out:
            json.dump(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
