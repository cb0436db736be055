"""Ranks whose loaders give all of them the same batches are told once; what differs, or cannot meet, is not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import hecate
from tests.support.models import PlainLanguageModel, batch
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.training.test_same_batches"
_TOLD = "all 2 ranks had the same batches"


def _train(batch_of: Callable[[int], torch.Tensor], steps: int = 5, **options: Any) -> list[str]:
    """The warnings of a few steps, each of two micro-batches, with an evaluation between them."""
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=4)
    hecate.compile(model, hecate.Config(**{"backend": "aot_eager", "policy": "static"} | options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            first, second = batch_of(2 * step), batch_of(2 * step + 1)
            with model.no_sync():
                model(first, first)["loss"].backward()
            model(second, second)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch(0), batch(0))
    return [str(w.message) for w in caught if "hecate" in str(w.message)]


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
        "sampler": _train(lambda step: own[step]),
        "other order": _train(lambda step: same[step].flip(0) if rank else same[step]),
        "first two only": _train(lambda step: own[step] if step == 2 else same[step]),
        "other lengths": _train(lambda step: torch.zeros(2, 8 + rank, dtype=torch.int64)),
        "replicate": _train(lambda step: same[step], policy="replicate"),
        "three forwards": _train(lambda step: same[step], steps=1),
    }


@cache
def results() -> list[dict[str, list[str]]]:
    return run_ranks(f"{_HERE}:train_all", 2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["default loader", "sharded"])
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
