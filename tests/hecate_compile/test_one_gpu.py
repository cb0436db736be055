"""Two ranks on one GPU, whose collectives run on a stream beside the compute."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm.queue import CollectiveQueue
from hecate.runtime.comm.stream_lane import Launched, StreamLane
from hecate.runtime.comm.supervise import wait_for_device
from hecate.runtime.comm.world import World
from tests.hecate_compile.test_parity import REPLICAS, measure
from tests.support.ranks import RanksFailed, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("plain", "qwen3_moe")
# About a tenth of a second.
CYCLES = 200_000_000


class SlowLane(StreamLane):
    """Each job begins late: whoever does not wait for it reads what was there before."""

    def launch(self, run: Callable[[], None], *, timed: bool) -> Launched:
        def late() -> None:
            torch.cuda._sleep(CYCLES)
            run()

        return super().launch(late, timed=timed)


def measure_over_gloo(slow: bool, backend: str) -> dict[str, Any]:
    """On one rank: gloo through the host, started and waited for as NCCL is."""
    plain = World.__post_init__

    def on_a_stream(world: World) -> None:
        plain(world)
        if world.group is not None:
            wait = partial(wait_for_device, group=world.group)
            lane = (SlowLane if slow else StreamLane)(world.device, wait=wait)
            object.__setattr__(world, "queue", CollectiveQueue(world.device, lane=lane))

    # Never undone: the rank ends with this function.
    pytest.MonkeyPatch().setattr(World, "__post_init__", on_a_stream)
    dist.init_process_group("gloo")
    return {family: measure(family, device="cuda", backend=backend, **REPLICAS) for family in FAMILIES}


@pytest.mark.parametrize(("slow", "backend"), [(False, "aot_eager"), (True, "aot_eager"), (True, "inductor")])
def test_jobs_on_a_stream_equal_one_process(slow: bool, backend: str) -> None:
    """Also with a sleep in each job. Torch's checker of streams is a mode under which Dynamo compiles nothing."""
    check(run_ranks(f"{__name__}:measure_over_gloo", 2, slow=slow, backend=backend))


def use_nccl() -> None:
    """Let NCCL take two ranks on one GPU: they look like two hosts, which talk over sockets."""
    os.environ |= {
        "NCCL_HOSTID": f"host{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))


def add_up() -> float:
    """On one rank: whether NCCL does it at all."""
    use_nccl()
    number = torch.ones(1, device="cuda")
    dist.all_reduce(number)
    return number.item()


def measure_over_nccl() -> dict[str, Any]:
    use_nccl()
    return {family: measure(family, device="cuda", **REPLICAS) for family in FAMILIES}


def skip_unless_nccl_takes_two() -> None:
    try:
        assert run_ranks(f"{__name__}:add_up", 2, timeout=90) == [2.0, 2.0]
    except RanksFailed as failure:
        if not any(reason in str(failure) for reason in ("Duplicate GPU", "invalid usage", "ncclInvalidUsage")):
            raise
        pytest.skip(f"NCCL does not take two ranks on this GPU: {str(failure)[-300:]}")


def test_ranks_over_nccl_equal_one_process() -> None:
    skip_unless_nccl_takes_two()
    check(run_ranks(f"{__name__}:measure_over_nccl", 2, timeout=150))


def check(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks:
        for family, result in of_rank.items():
            assert result["gradient"] < 1e-4, (family, result["worst"])
            assert result["rewritten"]["exchange_rows"] == 2, result["skipped"]
