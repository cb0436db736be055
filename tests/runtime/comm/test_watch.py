"""A rank that waits says so, in what, and what the others say of themselves."""

from __future__ import annotations

import io
import logging
import tempfile
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.comm import agreement, collectives, heartbeat, watch
from hecate.runtime.comm.history import history_of, known_groups
from hecate.runtime.comm.start import timeout_of
from hecate.runtime.comm.world import World
from tests.support.models import PlainLanguageModel, batch, build
from tests.support.ranks import RanksFailed, message_of, run_ranks
from tests.support.threads import on_threads

# Ranks tell each other more often than they do for users.
_OFTEN = 0.2


def compiled() -> torch.nn.Module:
    model = hecate.compile(PlainLanguageModel(hidden=8, layers=1, experts=2), hecate.Config(backend="aot_eager"))
    with torch.no_grad():
        model(batch(0))
    return model


def come_late() -> str:
    """On one rank: what is in the log when rank 1 sleeps."""
    watch.FIRST = 1.0
    model = compiled()
    dist.barrier()
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("hecate").addHandler(handler)
    if dist.get_rank() == 1:
        time.sleep(2.5)
    hecate.stats(model)
    logging.getLogger("hecate").removeHandler(handler)
    return handler.stream.getvalue()


def leave_early() -> str:
    """On rank 0: what is in the log when the loop of rank 1 has fewer batches, and its last comes late."""
    heartbeat.EVERY, watch.TOLD, watch.FIRST = _OFTEN, 0.5, 1.0
    model = compiled()
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("hecate").addHandler(handler)
    with torch.no_grad():
        for step in range(2):
            if (step, dist.get_rank()) == (1, 1):
                time.sleep(3)
            model(batch(step))
    logging.getLogger("hecate").removeHandler(handler)
    return handler.stream.getvalue()


def go_elsewhere() -> dict[str, str]:
    """On one rank: what is raised when rank 0 calls what rank 1 does not, which is elsewhere or never comes."""
    heartbeat.EVERY = _OFTEN
    model = compiled()
    group, store = compiled_model_of(model, "test").world.group, dist.distributed_c10d._get_default_store()
    assert group is not None
    found, told = {}, watch.TOLD
    watch.TOLD = 0.5
    dist.barrier()
    if dist.get_rank() == 0:
        found["in an exchange"] = message_of(lambda: hecate.stats(model))
        store.set("said", "yes")
    else:
        # As it looks to others: in a collective that the first rank has not begun.
        history_of(group).number += 1
        with watch.watched(group, "exchange of layer 0"):
            while not store.check(["said"]):
                time.sleep(0.05)
        history_of(group).number -= 1
        # What was pretended is told until the next round; no rank ever takes back a number.
        time.sleep(5 * _OFTEN)
    dist.barrier()
    watch.TOLD = told
    found |= {"another": message_of(model.state_dict if dist.get_rank() else lambda: hecate.stats(model))}
    dist.barrier()
    with mock.patch.object(agreement, "timeout_of", return_value=0.5):
        found["alone"] = message_of(model.state_dict) if dist.get_rank() == 0 else ""
    dist.barrier()
    hecate.stats(model)
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [("cuda:nccl", 600.0), ("cpu:gloo,cuda:nccl", 600.0), ("cpu:gloo,cuda:gloo", 700.0), ("cpu:mpi", 1800.0)],
)
def test_ranks_wait_as_long_as_their_group_says(
    config: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest of its backends; they differ unless the user says how long."""
    seconds = dict(part.split(":") for part in config.split(","))

    def backend(device: torch.device) -> Any:
        return SimpleNamespace(
            options=SimpleNamespace(_timeout=timedelta(seconds={"gloo": 700, "nccl": 600}[seconds[device.type]]))
        )

    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(minutes=30))
    group: Any = SimpleNamespace(_get_backend=backend)
    assert timeout_of(group) == expected


@pytest.mark.distributed
def test_who_waits_for_whom_in_what() -> None:
    first, second = run_ranks(come_late, 2, timeout=100)
    assert "rank 0 has waited for" in first and "s in hecate.stats: rank 1 does not say that it waits" in first
    assert second == ""


@pytest.mark.distributed
def test_a_rank_that_left_its_loop_is_told_by_how_often_it_called_the_model() -> None:
    first, second = run_ranks(leave_early, 2, timeout=100)
    assert "it has called the model twice and this rank 3 times: has its loop ended earlier?" in first
    assert "equally many batches" in first and "synced_gpus=True" in first
    assert second == ""


@pytest.mark.distributed
def test_a_meeting_of_ranks_that_call_different_things_or_do_not_come_ends() -> None:
    first, second = run_ranks(go_elsewhere, 2, timeout=100)
    assert "hecate.stats on rank 0, but rank 1 waits in exchange of layer 0" in first["in an exchange"]
    assert "call it on all ranks together" in first["in an exchange"]
    assert "hecate.stats on rank 0, but rank 1 calls state_dict" in first["another"]
    assert "state_dict on rank 1, but rank 0 calls hecate.stats" in second["another"]
    assert "ranks [1] did not come before the group's timeout" in first["alone"]


def save_on_rank_0() -> None:
    heartbeat.EVERY, watch.TOLD = _OFTEN, 0.5
    model = build("qwen3_moe", layers=1)
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    for step in range(3):
        ids = batch(step, rows=4)
        model(input_ids=ids, labels=ids).loss.backward()
        if dist.get_rank() == 0 and step == 1:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)


@pytest.mark.distributed
def test_saving_on_one_rank_alone_ends_all_of_them() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(save_on_rank_0, 2, timeout=100)
    assert "hecate: state_dict on rank 0, but rank 1 waits in" in str(failure.value)
    assert "call it on all ranks together" in str(failure.value)
    assert time.monotonic() - start < 60


def test_groups_that_are_gone_are_nobody_to_tell() -> None:
    kept = []

    def use(world: World) -> None:
        kept.append(world.group)
        collectives.all_reduce(torch.ones(1), world)

    on_threads(use)
    assert any(group in kept for group, _ in known_groups())
    with pytest.raises(KeyError, match="mine"), watch.telling("in its forward"):
        raise KeyError("mine")
