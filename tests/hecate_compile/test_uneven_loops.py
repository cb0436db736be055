"""One rank has more batches than another: it raises, and says why, once it is certain that the other cannot come."""

from __future__ import annotations

import atexit
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import hecate
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, batch
from tests.support.ranks import RanksFailed, run_ranks

_HERE = "tests.hecate_compile.test_uneven_loops"
_TIMEOUT = 90
# Seconds that a rank which has gone stays a process.
_GONE = 60
only_with_all = pytest.mark.skipif(not ALL, reason="with HECATE_TESTS=all")


def uneven(ending: str) -> float:
    """On one rank: steps of which the last rank calls one less than the others, or calls it late; seconds of it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT))
    config = hecate.Config(backend="aot_eager", policy="static")
    compiled = hecate.compile(PlainLanguageModel(hidden=8, layers=1, experts=4), config)

    def step(number: int) -> None:
        ids = batch(number)
        compiled(ids, labels=ids)["loss"].backward()

    step(0)
    if dist.get_rank() < dist.get_world_size() - 1:
        started = dist.barrier(async_op=True) if ending == "a collective that all have begun" else None
        start = time.monotonic()
        step(1)
        if started is not None:
            started.wait()
        return time.monotonic() - start
    if ending == "barrier":
        dist.barrier()
    elif ending == "gather":
        dist.all_gather_object([None] * dist.get_world_size(), "done")
    elif ending == "group":
        dist.destroy_process_group()
        time.sleep(_GONE)
    elif ending in ("exit", "error"):
        if ending == "error":
            sys.last_value = KeyError("mine")
        # What Python does at its end, and ranks of these tests do not.
        atexit._run_exitfuncs()
        time.sleep(_GONE)
    elif ending == "a collective that all have begun":
        dist.barrier()
        time.sleep(8)
        step(1)
    else:
        time.sleep(14)
        step(1)
    return 0.0


def failed(ending: str) -> str:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(f"{_HERE}:uneven", 2, timeout=100, grace=0.5, ending=ending)
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
@pytest.mark.parametrize("ending", ["it is slow", "a collective that all have begun"])
def test_a_rank_that_is_late_is_waited_for(ending: str) -> None:
    first, _ = run_ranks(f"{_HERE}:uneven", 2, timeout=100, ending=ending)
    assert first > 7
