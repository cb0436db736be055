"""One rank has more batches than another: it raises, and says why, once it is certain that the other cannot come."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hecate
from hecate.runtime.comm import heartbeat, program, supervise, watch
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, batch
from tests.support.ranks import RanksFailed, run_ranks

_HERE = "tests.hecate_compile.test_uneven_loops"
_TIMEOUT = 90
# Seconds that a rank which has gone stays a process, and those by which one comes late.
_GONE, _LATE = 60, 3.0
only_with_all = pytest.mark.skipif(not ALL, reason="with HECATE_TESTS=all")


def prepared() -> Callable[[int], None]:
    """On one rank: a step of a compiled model that all ranks have called once; waits are looked at often."""
    heartbeat.EVERY, watch.TOLD, supervise.ROUND, program._STAYS = 0.2, 0.4, 0.2, 1.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT))
    config = hecate.Config(backend="aot_eager", policy="static")
    compiled = hecate.compile(PlainLanguageModel(hidden=8, layers=1, experts=4), config)

    @torch.no_grad()
    def step(number: int) -> None:
        compiled(batch(number))

    step(0)
    return step


def leave(ending: str) -> None:
    """On one rank: steps of which the last rank calls one less than the others."""
    step = prepared()
    if dist.get_rank() < dist.get_world_size() - 1:
        step(1)
    elif ending == "barrier":
        dist.barrier()
    elif ending == "gather":
        dist.all_gather_object([None] * dist.get_world_size(), "done")
    elif ending == "group":
        dist.destroy_process_group()
    else:
        if ending == "error":
            sys.last_value = KeyError("mine")
        # What Python does at its end, and ranks of these tests do not.
        atexit._run_exitfuncs()
    time.sleep(_GONE)


def come_late() -> list[float]:
    """Seconds of two steps to which the last rank comes late.

    The second time a rank waits for it in a barrier, which the first rank, waiting in its step, has begun as well.
    """
    step, found, rank = prepared(), [], dist.get_rank()
    for number in (1, 2):
        start = time.monotonic()
        if rank == dist.get_world_size() - 1:
            time.sleep(_LATE)
        begun = dist.barrier(async_op=rank == 0) if number == 2 else None
        step(number)
        if begun is not None:
            begun.wait()
        found.append(time.monotonic() - start)
    return found


def failed(ending: str) -> str:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(f"{_HERE}:leave", 2, timeout=100, grace=0.5, ending=ending)
    # With launching and compiling; the group's timeout is longer.
    assert time.monotonic() - start < 45
    assert " cannot end: rank 1 " in str(failure.value)
    return str(failure.value)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ending", "called"),
    [("barrier", "barrier"), pytest.param("gather", "all_gather_object", marks=only_with_all)],
)
def test_a_rank_that_left_the_loop_for_another_collective_is_named(ending: str, called: str) -> None:
    message = failed(ending)
    assert f"waits in torch.distributed.{called} (test_uneven_loops.py, line " in message
    assert "), which this rank has not called" in message
    assert "it has called the model once and this rank twice: has its loop ended earlier?" in message


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("group", "has ended torch.distributed (destroy_process_group)"),
        ("exit", "ended its program"),
        ("error", "raised KeyError: 'mine' and ended"),
    ],
)
def test_a_rank_that_left_for_good_is_named(ending: str, told: str) -> None:
    assert told in failed(ending)


@pytest.mark.distributed
def test_a_rank_that_is_late_is_waited_for() -> None:
    first, *_ = run_ranks(f"{_HERE}:come_late", 3, timeout=100)
    assert min(first) > _LATE - 1
