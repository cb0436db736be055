"""Rates of this machine: how fast it computes and communicates, measured once in ``hecate.compile``."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import World
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.topology import Topology

# A rank sends so many bytes: enough for latency not to matter.
_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
# A matmul of this side takes much longer than its launch, and is still too short to be noticed.
_SIDE = {"cpu": 512, "cuda": 4096}
_REPEATS = 3
# On a GPU so many are launched at once that only the GPU's own time counts.
_LAUNCHES, _EXCHANGES = 20, 5
# Bytes per second of a link that carries nothing.
NO_LINK = 1e15
# Kept by group, and not by world: a cache must keep neither a model's queue nor a group that was destroyed.
_measured: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Rates]] = weakref.WeakKeyDictionary()


def measure_rates(dtype: torch.dtype, topology: Topology, world: World) -> Rates:
    """Time matmuls, and all-to-alls inside nodes and between them; the slowest rank counts. A collective.

    Rates are medians, measured once in a process for each dtype, topology and group, and equal on all ranks.
    """
    assert world.group is not None, "one rank has nobody to measure with"
    of_group, key = _measured.setdefault(world.group, {}), (dtype, topology, world.device)
    if key not in of_group:
        of_group[key] = _measure(dtype, topology, world)
    return of_group[key]


def _measure(dtype: torch.dtype, topology: Topology, world: World) -> Rates:
    side, size = _SIDE.get(world.device.type, 512), _BYTES.get(world.device.type, 2**22)
    # A GPU multiplies numbers that are all alike faster than those of a model, so these are random. The user's random
    # numbers stay as they are.
    numbers = torch.Generator(world.device).manual_seed(0)
    a = torch.randn(side, side, dtype=dtype, device=world.device, generator=numbers)
    memory = torch.randint(256, (size,), dtype=torch.uint8, device=world.device, generator=numbers)
    nodes = topology.node_of
    inside = [
        [source for source, node in enumerate(nodes) if node == mine and source != rank]
        for rank, mine in enumerate(nodes)
    ]
    across = [[source for source, node in enumerate(nodes) if node != mine] for mine in nodes]
    seconds = torch.tensor(
        [
            _median(lambda: a @ a, world.device, _LAUNCHES),
            _exchange_time(inside, memory, world),
            _exchange_time(across, memory, world),
            _median(memory.clone, world.device, _LAUNCHES),
        ],
        dtype=torch.float64,
        device=world.control_device,
    )
    collectives.all_reduce(seconds, world, dist.ReduceOp.MAX)
    compute, within, between, copy = seconds.tolist()
    most = max(map(len, topology.members))
    return Rates(
        flops=2 * side**3 / compute,
        rank_bytes=size / within if within else NO_LINK,
        node_bytes=size * most / between if between else NO_LINK,
        memory_bytes=2 * size / copy,
    )


def _exchange_time(peers: list[list[int]], memory: torch.Tensor, world: World) -> float:
    """Return the seconds in which every rank with peers sends them ``memory``; 0 if no rank has any."""
    if not any(peers):
        return 0.0
    shares = [len(memory) // max(1, len(others)) for others in peers]
    mine = peers[world.rank]
    send = [shares[world.rank] if rank in mine else 0 for rank in range(world.size)]
    receive = [shares[rank] if rank in mine else 0 for rank in range(world.size)]
    rows = memory[: sum(send)]
    # Through the host a single exchange takes long enough.
    launches = _EXCHANGES if world.queue.on_stream else 1
    return _median(lambda: collectives.all_to_all(rows, send, receive, world), world.device, launches)


def _median(work: Callable[[], object], device: torch.device, launches: int) -> float:
    """Return the median seconds of one ``work``; on a CPU each is timed on its own."""
    if device.type == "cpu":
        times = [_on_host(work) for _ in range(_REPEATS + 1)]
    else:
        times = [_on_device(work, torch.get_device_module(device), launches) for _ in range(_REPEATS + 1)]
    # The first one sets things up.
    return max(sorted(times[1:])[_REPEATS // 2], 1e-9)


def _on_host(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _on_device(work: Callable[[], object], module: Any, launches: int) -> float:
    """Return the seconds of one ``work`` between two events of the stream; ``module`` is ``torch.cuda`` or alike."""
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    module.synchronize()
    # While the device is busy with this one the host launches the next, and late ranks arrive.
    work()
    begin.record()
    for _ in range(launches):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / launches
