"""How fast an emulated rank is, measured with its quota while all ranks do the same: what the simulator is told."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from benchmarks.compare import shapes
from benchmarks.emulator.throttle import FREED
from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import World

# Long enough that a rank is stopped and let go many times (quota periods are 7 ms).
SECONDS, REPEATS = 2.0, 5
# Of steps that are held against each other.
TURNS = 9
# How often, and how many exchanges make a chain: as many as the backward of two layers has.
LATENCIES, CHAINS, EXCHANGES = 50, 5, 4


def measure(shape: shapes.Shape, world: World) -> dict[str, float]:
    """Fields of a :class:`hecate.simulator.ClusterSpec`, with the rate that exchanges reach as ``node_bytes``.

    All ranks together.

    Matmuls, element-wise operations and exchanges have the sizes of ``shape``. Rates of compute are means over ranks.
    Collectives are timed until the last rank is done.
    """
    rows, weights = torch.ones(shape.tokens, shape.hidden), torch.ones(shape.hidden, 4 * shape.hidden)
    one, few = torch.ones(1), torch.ones(world.size)
    per_matmul, per_copy, per_operator = (
        _mean(_rate(work)) for work in (lambda: rows @ weights, lambda: torch.mul(rows, 2.0), lambda: one + one)
    )
    size = shape.rows * shape.hidden * 4
    nodes = [rank // shapes.RANKS_PER_NODE for rank in range(world.size)]
    # A rank comes to a collective from computing.
    latency, twice_around = (
        statistics.median(_together(work, world, before=lambda: rows @ weights) for _ in range(LATENCIES))
        for work in (
            lambda: collectives.all_to_all(few, [1] * world.size, [1] * world.size, world),
            # Gathering so little goes straight, a sum around the ring and back.
            lambda: collectives.all_reduce(one, world),
        )
    )
    # A small exchange inside a node takes its latency, whatever its size.
    large = 8 * size
    inside = _exchange([[a == b and r != q for q, b in enumerate(nodes)] for r, a in enumerate(nodes)], large, world)
    # Of what a rank sends to all, this leaves its node.
    leaving = size * (1 - shapes.RANKS_PER_NODE / world.size)
    across = _exchange([[True] * world.size] * world.size, size, world)
    return {
        "flops": 2 * rows.numel() * 4 * shape.hidden / (per_matmul - per_operator),
        "memory_bytes": 2 * rows.numel() * 4 / (per_copy - per_operator),
        "operator": per_operator,
        "latency": latency,
        "ring": max(0.0, twice_around - latency) / 2,
        "rank_bytes": large / (inside - latency),
        "node_bytes": shapes.RANKS_PER_NODE * leaving / (across - latency),
    }


def measure_in_turns(works: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Of each of ``works`` the seconds that it says: of each rank the median, and of these the mean.

    All ranks together. They take turns, so that all are of the same minutes: what is worked out from two of them does
    not have in it how fast the machine was in the one and in the other.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(TURNS):
        for name, work in works.items():
            dist.barrier()
            times[name].append(work())
    return {name: _mean(statistics.median(found)) for name, found in times.items()}


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_pace(step: Callable[[], object]) -> list[float]:
    """Seconds of one ``step`` that exchanges nothing, on each rank. All ranks together.

    Against what :func:`measure_in_turns` found for the same it says how fast the machine is now; best with a model
    that is the same in all versions of the engine. One comes before it, as other models ran last.
    """
    step()
    dist.barrier()
    mine = seconds_of(step)
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def pace_of(times: Sequence[Sequence[float]]) -> float:
    """What :func:`measure_pace` found some times: of each rank the median, and of these the mean."""
    return statistics.mean(map(statistics.median, zip(*times, strict=True)))


def measure_beside(step: Callable[[], object], shape: shapes.Shape, world: World) -> float:
    """How many times as long ``step``, which exchanges nothing, takes while all ranks exchange rows in other threads.

    Interrupts that packets cause are counted as time of whatever thread a core runs, and caches are shared: on the
    emulated cluster a rank pays for what travels, although nothing of its program does.
    """
    size = shape.rows * shape.hidden * 4
    each = _exchange([[True] * world.size] * world.size, size, world)
    share = [size // world.size] * world.size
    data = torch.zeros(sum(share), dtype=torch.uint8)

    def exchange(times: int) -> None:
        for _ in range(times):
            collectives.all_to_all(data, share, share, world)

    alone, beside = [], []
    for _ in range(REPEATS):
        dist.barrier()
        alone += [seconds_of(step), seconds_of(step)]
        # As many on all ranks, and enough for some steps.
        count = max(1, round(6 * _mean(alone[-1]) / each))
        exchanges = threading.Thread(target=exchange, args=(count,))
        dist.barrier()
        exchanges.start()
        # Until the thread has left the quota of the one that made it.
        time.sleep(2 * FREED)
        while exchanges.is_alive():
            found = seconds_of(step)
            if exchanges.is_alive():
                beside.append(found)
        exchanges.join()
    return _mean(statistics.median(beside)) / _mean(statistics.median(alone))


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
    """Seconds in which every rank sends ``size`` bytes to its peers.

    One exchange follows the other, as in a step: flows share a link unevenly, ranks drift apart, and the flows of two
    exchanges meet. A single one, after a barrier, finds a faster link than a step does (docs/decisions.md).
    """
    share = size // sum(peers[0])
    send = [share * wanted for wanted in peers[world.rank]]
    receive = [share * line[world.rank] for line in peers]
    data = torch.zeros(sum(send), dtype=torch.uint8)

    def chain() -> None:
        for _ in range(EXCHANGES):
            collectives.all_to_all(data, send, receive, world)

    return statistics.mean(_together(chain, world) for _ in range(CHAINS)) / EXCHANGES


def _together(work: Callable[[], object], world: World, before: Callable[[], object] = lambda: None) -> float:
    """Seconds from when the last rank begins to when the last is done; all are on one machine and share a clock."""
    dist.barrier()
    before()
    begun = time.perf_counter()
    work()
    times = collectives.all_gather_even(torch.tensor([begun, time.perf_counter()], dtype=torch.float64), world)
    begun, done = times.amax(0).tolist()
    return float(done - begun)


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
