"""Ranks whose loaders give all of them the same batches are told once; what differs, or cannot meet, is not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import hecate
from hecate.runtime.comm.world import World
from hecate.runtime.state.step_mode import StepMode
from hecate.training.drift import SameBatches
from tests.support.models import PlainLanguageModel, batch
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.training.test_same_batches"
_CPU = torch.device("cpu")
_TOLD = "all 2 ranks had the same batches"


def _train(batch_of: Callable[[int], torch.Tensor], *, evaluate: bool = False, **options: Any) -> list[str]:
    """The warnings of some steps, each of two micro-batches; equal batches are evaluated between them if wanted."""
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=2)
    hecate.compile(model, hecate.Config(**{"backend": "aot_eager", "policy": "static"} | options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            first, second = batch_of(2 * step), batch_of(2 * step + 1)
            with model.no_sync():
                model(first, first)["loss"].backward()
            model(second, second)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluate:
                with torch.no_grad():
                    model(batch(0), batch(0))
    return [str(w.message) for w in caught if "hecate" in str(w.message)]


def _compare(batch_of: Callable[[int], torch.Tensor], forwards: int = 5) -> list[str]:
    """The warnings of as many training forwards, without a model: what it computes plays no part."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD, device=_CPU)
    same, mode = SameBatches(world, enabled=True), StepMode(training=True, first=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(forwards):
            same.before_forward(mode, (batch_of(step),), {})
    return [str(w.message) for w in caught]


def _loaded(*, split: bool) -> list[torch.Tensor]:
    """Batches of a loader as most programs have it, and of one that knows of ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = torch.cat([batch(step, rows=4) for step in range(10)])
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False) if split else None
    return list(DataLoader(data, batch_size=2, sampler=sampler))


def train_all() -> dict[str, list[str]]:
    rank = int(os.environ["RANK"])
    same, own = _loaded(split=False), _loaded(split=True)
    return {
        "default loader": _train(lambda step: same[step]),
        "sharded": _train(lambda step: same[step], dense="shard"),
        "sampler": _compare(lambda step: own[step]),
        "other order": _compare(lambda step: same[step].flip(0) if rank else same[step]),
        "first two only": _train(lambda step: own[step] if step == 2 else same[step], evaluate=True),
        "other lengths": _compare(lambda step: torch.zeros(2, 8 + rank, dtype=torch.int64)),
        "replicate": _train(lambda step: same[step], policy="replicate"),
        "three forwards": _compare(lambda step: same[step], forwards=3),
        "four forwards": _compare(lambda step: same[step], forwards=4),
    }


@cache
def results() -> list[dict[str, list[str]]]:
    return run_ranks(f"{_HERE}:train_all", 2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["default loader", "sharded", "four forwards"])
def test_the_same_batches_are_told_once_by_rank_zero(name: str) -> None:
    first, second = (result[name] for result in results())
    assert len(first) == 1 and second == []
    assert _TOLD in first[0] and "DistributedSampler" in first[0] and "split_dataset_by_node" in first[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["sampler", "other order", "first two only", "other lengths", "replicate", "three forwards"]
)
def test_what_is_right_or_cannot_be_compared_is_not_told(name: str) -> None:
    for result in results():
        assert result[name] == []


def test_one_process_is_not_told() -> None:
    assert _train(lambda step: batch(0)) == []
