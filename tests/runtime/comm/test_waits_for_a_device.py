"""The host waits for what a stream brings, as with NCCL: who keeps it waiting is told as soon as with gloo."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm import collectives, heartbeat, queue, supervise, watch
from hecate.runtime.comm.history import history_of
from hecate.runtime.comm.queue import CollectiveQueue, Job
from hecate.runtime.comm.stream_lane import StreamLane
from hecate.runtime.comm.supervise import begin, wait_for_device
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.policy import Static
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.placer import Placer
from tests.support.fake_cuda import CPU, Cuda, Event, Stream
from tests.support.layers import add_layer
from tests.support.ranks import RanksFailed, message_of, run_ranks

_EXPERTS = 4
# Timeouts of groups: one that nobody should have to wait for, and one that somebody has to.
_LONG, _SHORT = 60, 6


class Device(Cuda):
    """A device that is as far as gloo is with what was launched on it, or comes no further.

    Attributes:
        stuck: nothing that is launched from now on ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Callable[[], bool]] = []
        self.stuck = False

    def Event(self, enable_timing: bool) -> Event:
        return _Event(self, enable_timing)

    def supervised(self, kind: str, start: Any, tensor: Any, group: Any, splits: Any = None) -> None:
        """What is done for a collective of NCCL: it is launched."""
        begin(kind, tensor, group, splits)
        with watch.watched(group):
            if self.stuck:
                self.launched.append(lambda: False)
                return
            awaited = start(history_of(group).order)
            self.launched.append(lambda: awaited is None or awaited.wait(0.05))


class _Event(Event):
    def __init__(self, device: Device, timed: bool) -> None:
        super().__init__(device.log, timed)
        self.device, self.behind = device, 0

    def record(self, stream: Stream) -> None:
        self.behind = len(self.device.launched)

    def query(self) -> bool:
        return all(completed() for completed in self.device.launched[: self.behind])


def wait_in_vain(fault: str, on_stream: bool, quick: bool = True) -> tuple[str, float]:
    """On one rank: what is raised, and how many seconds after the launch of what does not end.

    Args:
        fault: of rank 1. "other": it is in something else; "late": it is alive and never comes; "killed".
        on_stream: else over gloo, on its thread.
        quick: ranks tell each other more often.
    """
    if quick:
        heartbeat.EVERY, watch.TOLD, supervise.ROUND = 0.1, 0.3, 0.1
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=_SHORT if fault == "late" else _LONG))
    world, device = World(rank=rank, size=dist.get_world_size(), group=group, device=CPU), Device()
    if on_stream:
        lane = StreamLane(CPU, wait=partial(wait_for_device, group=group), cuda=device)
        object.__setattr__(world, "queue", CollectiveQueue(CPU, lane=lane))
        collectives.supervised = device.supervised
    placer = Placer(Static(), Topology.even(world.size, world.size), world)
    owners = Owners.contiguous(_EXPERTS, world.size)
    layer = add_layer(name="blocks.0.experts", owners=owners, world=world, placer=placer)
    rows = torch.tensor([[3, 0, 2, 1], [1, 4, 0, 5]])

    def counts() -> torch.Tensor:
        placement, _ = torch.ops.hecate.place(torch.zeros(1), layer.id)
        return torch.ops.hecate.gather_counts(rows[rank].cumsum(0).to(torch.int32), placement, layer.id)

    assert torch.equal(counts(), rows)
    device.stuck, store = True, dist.distributed_c10d._get_default_store()
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        message = message_of(counts)
        seconds = time.monotonic() - start
        if fault == "killed":
            # The run has failed, and has no results.
            raise AssertionError(f"after {seconds:.1f} s {message}")
        store.set("told", "1")
        return message, seconds
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "other":
        total = torch.zeros(11)
        job = Job(world.queue, lambda: collectives.all_reduce(total, world), on_host=True, label="the sum of losses")
        message = message_of(lambda: queue.run(job))
    else:
        message = ""
    seconds = time.monotonic() - start
    # A wait of the store would keep this rank from telling that it is alive.
    while not store.check(["told"]):
        time.sleep(0.05)
    return message, seconds


def both(fault: str) -> tuple[list[Any], list[Any]]:
    """Over gloo on a thread, and on a stream, at the same time."""

    def run(on_stream: bool) -> list[Any]:
        return run_ranks(wait_in_vain, 2, timeout=100, fault=fault, on_stream=on_stream)

    with ThreadPoolExecutor() as pool:
        over_gloo, on_stream = pool.map(run, (False, True))
    return over_gloo, on_stream


@pytest.mark.distributed
def test_a_rank_in_something_else_is_named_on_both() -> None:
    for results in both("other"):
        for message, seconds in results:
            assert message.startswith("DisagreementError: hecate: ranks disagree on collective 2"), message
            assert "rank 0: gather_counts of blocks.0.experts, step 1" in message, message
            assert "rank 1: the sum of losses" in message, message
            assert seconds < 5


@pytest.mark.distributed
def test_a_rank_that_never_comes_is_named_before_the_timeout_ends_the_process() -> None:
    over_gloo, on_stream = (results[0] for results in both("late"))
    for message, _ in (over_gloo, on_stream):
        assert message.startswith("RuntimeError: hecate: gather_counts of blocks.0.experts, step 1 cannot end:")
        assert re.search(r"Rank 1 is alive but has not begun it; the last that it began is gather_counts", message)
    assert on_stream[1] < _SHORT, "before a watchdog would end it"


@pytest.mark.distributed
def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(wait_in_vain, 2, timeout=100, fault="killed", on_stream=True)
    message = r"after ([\d.]+) s RankEndedError: hecate: gather_counts of .* cannot end: rank 1 has not been heard of"
    told = re.search(message, str(failure.value))
    assert told is not None, failure.value
    assert float(told[1]) < 15
