"""Twins stay equal to the last bit, through checkpoints between all kinds of groups."""

from __future__ import annotations

import os
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.training.digest import digest
from hecate.wrap.shard import shard_of
from tests.support.adversaries import Anything
from tests.support.models import batch, build
from tests.support.parity import (
    clear_gradients,
    compiled_on_free_links,
    run_step,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

_HERE = "tests.hecate_compile.groups.test_checkpoints"


def _differing(model: nn.Module) -> int:
    """Tensors whose bits differ between ranks that should have the same, gradients and all."""
    mesh, differing = compiled_model_of(model, "test").mesh, 0
    for parameter in model.parameters():
        world = mesh.everyone if shard_of(parameter) is None else mesh.twins
        for tensor in (parameter, parameter.grad):
            mine = None if tensor is None else (int(digest(tensor)), tensor.shape)
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, mine)
            differing += len({told[rank] for rank in world.numbers or range(world.size)}) != 1
    return differing


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Numbers of the whole model that no two models share."""
    with torch.no_grad():
        return [float((p.double() ** 2).sum()) for p in model.state_dict().values()]


def stage(directory: str, group: int | None, steps: int, first: bool) -> dict[str, Any]:
    """Load what the last stage saved, train on, with owners that move, and save."""
    model = build("qwen3_moe")
    policy = Anything(reshard_every=10)
    policy._random.seed(int(os.environ.get("RANK", 0)) // (group or 8))
    compiled_on_free_links(model, expert_group=group, policy=policy, dense="shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    at = 0 if first else hecate.load(directory, model, optimizer).step
    loaded = _digest(model, optimizer)
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    for _ in range(steps):
        # Every rank has data of its own.
        ids = torch.randint(0, 96, (2, 16))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids)["loss"].backward()
        hecate.clip_grad_norm_(model, 1.0)
        optimizer.step()
    hecate.save(directory, model, optimizer, step=at + steps)
    return {
        "loaded": loaded,
        "saved": _digest(model, optimizer),
        "moves": len(compiled_model_of(model, "test").owner_mover.moves),
        "differing": _differing(model) if dist.is_initialized() else 0,
    }


def test_twins_are_equal_to_the_bit_and_checkpoints_go_between_all_groups(tmp_path: Path) -> None:
    stages = [(4, 2, 31), (4, None, 2), (2, 1, 2), (1, None, 2), (4, 2, 2)]
    found = [
        run_ranks(
            f"{_HERE}:stage", ranks, timeout=300, directory=str(tmp_path), group=group, steps=steps, first=not number
        )[0]
        for number, (ranks, group, steps) in enumerate(stages)
    ]
    assert found[0]["moves"] == 3 and not any(one["differing"] for one in found)
    for before, after in pairwise(found):
        assert after["loaded"] == before["saved"]


def went_on(directory: str) -> dict[str, Any]:
    """Six steps without a stop, and three of them after a load, with the default policy."""

    def compiled() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build("qwen3_moe")
        compiled_on_free_links(model, expert_group=2, reshard_every=2)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            clear_gradients(model)
            run_step(model, batch(step))
            optimizer.step()

    model, optimizer = compiled()
    train(model, optimizer, range(3))
    hecate.save(directory, model, optimizer, step=3)
    train(model, optimizer, range(3, 6))
    again, other = compiled()
    hecate.load(directory, again, other)
    train(again, other, range(3, 6))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    plans = [
        [str(layer.placer.plan.current) for layer in compiled_model_of(one, "test").layers] for one in (model, again)
    ]
    with torch.no_grad():
        if dist.get_rank() == 3:
            next(p for name, p in model.named_parameters() if "experts" in name).add_(1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hecate.save(directory, model, optimizer, step=6)
    return {"same": same, "plans": plans[0] == plans[1], "warned": [str(w.message) for w in warned]}


def test_a_run_goes_on_bit_for_bit_and_a_save_names_shards_that_have_drifted(tmp_path: Path) -> None:
    found = run_ranks(f"{_HERE}:went_on", 4, timeout=300, directory=str(tmp_path))
    assert all(one["same"] and one["plans"] for one in found)
    (told,) = (text for text in found[1]["warned"] if "hecate.save" in text)
    assert "mlp.experts" in told and "of rank 3 is off rank 1's" in told
