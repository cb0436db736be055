"""How fast an emulated rank is, measured with its quota while all ranks do the same: what the simulator is told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.compare import shapes
from hecate.runtime import transport
from hecate.runtime.world import World

# Long enough that a rank is stopped and let go many times (quota periods are 7 ms).
SECONDS, REPEATS = 2.0, 5


def measure(shape: shapes.Shape, world: World) -> dict[str, float]:
    """The fields of a :class:`hecate.simulator.ClusterSpec`, means over ranks. All ranks together.

    Matmuls, element-wise operations and exchanges have the sizes of ``shape``.
    """
    rows, weights = torch.ones(shape.tokens, shape.hidden), torch.ones(shape.hidden, 4 * shape.hidden)
    one = torch.ones(1)
    per_matmul, per_copy, per_operator = (
        _mean(_rate(work)) for work in (lambda: rows @ weights, lambda: torch.mul(rows, 2.0), lambda: one + one)
    )
    size = shape.rows * shape.hidden * 4
    nodes = [rank // shapes.RANKS_PER_NODE for rank in range(world.size)]
    # Inside a node the size of an exchange is no matter of bytes.
    large = 8 * size
    inside = _exchange([[a == b and r != q for q, b in enumerate(nodes)] for r, a in enumerate(nodes)], large, world)
    across = _exchange([[a != b for b in nodes] for a in nodes], size, world)
    latency = _median(lambda: transport.all_gather_even(one, world))
    return {
        "flops": 2 * rows.numel() * 4 * shape.hidden / (per_matmul - per_operator),
        "memory_bytes": 2 * rows.numel() * 4 / (per_copy - per_operator),
        "operator": per_operator,
        "latency": latency,
        "rank_bytes": large / inside,
        "node_bytes": shapes.RANKS_PER_NODE * size / across,
    }


def measure_alone(step: Callable[[], object], update: Callable[[], object]) -> dict[str, float]:
    """Seconds of a forward and backward, and of an update, of a model that exchanges nothing. All ranks together."""
    times: dict[str, list[float]] = {"step": [], "update": []}
    for _ in range(REPEATS):
        for name, work in (("step", step), ("update", update)):
            dist.barrier()
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: _mean(statistics.median(found)) for name, found in times.items()}


def _rate(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    work()
    dist.barrier()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        work()
        count += 1
    return (time.perf_counter() - start) / count


def _exchange(peers: list[list[bool]], size: int, world: World) -> float:
    """Seconds in which every rank sends ``size`` bytes to its peers."""
    share = size // sum(peers[0])
    send = [share * wanted for wanted in peers[world.rank]]
    receive = [share * line[world.rank] for line in peers]
    data = torch.zeros(sum(send), dtype=torch.uint8)
    return _median(lambda: transport.all_to_all(data, send, receive, world))


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return _mean(statistics.median(times))


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
