"""A run that was saved and loaded goes on as if it had not stopped, on as many ranks or on others."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from tests.hecate_compile.wrap.test_stack_experts import small
from tests.support.adversaries import Restless
from tests.support.extent import ALL
from tests.support.models import VOCABULARY, build
from tests.support.parity import rank_and_size, state_error
from tests.support.ranks import run_ranks

# Two nodes with a slow link between them, so that experts are replicated.
_TWO_NODES = dict(
    topology=hecate.Topology((0, 1)),
    rates=hecate.Rates(flops=1e10, rank_bytes=1e9, node_bytes=1e7, hidden_seconds=1e-3),
)


class Run:
    """A training run as users write it: data order, dropout and schedule depend on what must be restored."""

    def __init__(self, kind: str, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        if kind == "list":
            model: Any = small(seed=seed, layers=1)
        else:
            model = build(kind, seed=seed, **({"layers": 2, "experts": 6} if kind == "plain" else {"layers": 1}))
        if kind == "qwen3_moe":
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.1
        dense = options.pop("dense", "replicate")
        made = options.pop("optimizer", "adamw")
        self.model = hecate.compile(
            model.train(),
            hecate.Config(backend="aot_eager", dense=dense, policy=Restless(reshard_every=2), **options),
        )
        self.optimizer = _optimizer(made, self.model)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=40)
        # Other numbers on every rank.
        rank, _ = rank_and_size()
        for one, start in ((torch.manual_seed, 100), (np.random.seed, 200), (random.seed, 300)):
            one(start + seed * 10 + rank)
        self.losses: list[float] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            # A batch of each generator, so that none is forgotten.
            skew = 1 + np.random.randint(3) + random.randrange(2)
            ids = torch.randint(0, VOCABULARY // skew, (2, 16))
            loss = self.model(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            hecate.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def replicas(self) -> int:
        return sum(layer.replicas for layer in compiled_model_of(self.model, "test").layers)

    def owners(self) -> list[tuple[int, ...]]:
        return [layer.owners.ranks for layer in compiled_model_of(self.model, "test").layers]


def _optimizer(made: str, model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    if made == "sgd":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, foreach=False)
    return torch.optim.AdamW(groups, lr=0.01, fused=made == "fused", foreach=made == "foreach")


def resume(folder: str, kind: str, in_background: bool, options: dict[str, Any]) -> dict[str, Any]:
    if options.pop("nodes", False):
        options |= _TWO_NODES
    first = Run(kind, seed=0, **options)
    first.steps(5)
    extra = {"schedule": first.schedule.state_dict()}
    if in_background:
        saving = hecate.async_save(folder, first.model, first.optimizer, step=5, extra=extra)
        # What trains on meanwhile must not be in it.
        first.steps(4)
        saving.result(60)
    else:
        hecate.save(folder, first.model, first.optimizer, step=5, extra=extra)
        first.steps(4)
    random_numbers = _random_numbers()
    second = Run(kind, seed=1, **options)
    second.steps(1)
    found = hecate.load(folder, second.model, second.optimizer)
    second.schedule.load_state_dict(found.extra["schedule"])
    second.steps(4)
    a, b = first.model.state_dict(), second.model.state_dict()
    mine, theirs = _state(first), _state(second)
    return {
        "losses": first.losses[5:] == second.losses[1:],
        "weights": a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a),
        "moments": len(mine) == len(theirs) > 0 and all(map(torch.equal, mine, theirs)),
        "rate": [group["lr"] for group in first.optimizer.param_groups]
        == [group["lr"] for group in second.optimizer.param_groups],
        "owners": first.owners() == second.owners(),
        "random": random_numbers == _random_numbers(),
        "moved": any(list(owners) != sorted(owners) for owners in first.owners()),
        "replicas": first.replicas(),
        "step": found.step,
    }


def _random_numbers() -> list[float]:
    """The next ones of each generator."""
    return [torch.rand(()).item(), np.random.rand(), random.random()]


def _state(run: Run) -> list[torch.Tensor]:
    return [
        value
        for group in run.optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(run.optimizer.state[parameter].items())
        if value is not None
    ]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "in_background", "options"),
    [
        ("qwen3_moe", False, {"nodes": True, "optimizer": "foreach"}),
        ("plain", True, {"dense": "shard", "optimizer": "sgd"}),
        *([("list", False, {"optimizer": "fused"})] if ALL else []),
    ],
)
def test_goes_on_bit_for_bit(tmp_path: Path, kind: str, in_background: bool, options: dict[str, Any]) -> None:
    given = {"folder": str(tmp_path), "kind": kind, "in_background": in_background, "options": options}
    for found in run_ranks(resume, 2, **given):
        assert found["step"] == 5
        assert all(found[key] for key in ("losses", "weights", "moments", "rate", "owners", "random")), found
        # Otherwise there would be little to restore.
        assert found["moved"]
        assert found["replicas"] > 0 or "nodes" not in options
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step")] == ["step-00000005"]


# --- another number of ranks ---


def train(folder: str, start: int, stop: int, dense: Any) -> dict[str, Any]:
    """Steps ``start`` to ``stop``, and a checkpoint."""
    model = hecate.compile(
        build("plain", seed=start, dtype=torch.float64, layers=1, experts=4),
        hecate.Config(backend="aot_eager", dense=dense, policy=Restless(reshard_every=2)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if start:
        assert hecate.load(folder, model, optimizer).step == start
    losses = go_on(model, optimizer, range(start, stop), lambda: hecate.clip_grad_norm_(model, 0.5))
    hecate.save(folder, model, optimizer, step=stop)
    return {"losses": losses}


def go_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: Callable[[], object]
) -> list[float]:
    """Train on the same global batches, whatever the number of ranks; the mean losses."""
    rank, size = rank_and_size()
    losses = []
    for step in steps:
        ids = torch.randint(0, VOCABULARY // 3, (12, 8), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(size)[rank]
        loss = model(input_ids=mine, labels=mine)["loss"]
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if size > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / size)
    return losses


@pytest.mark.distributed
def test_other_numbers_of_ranks_go_on_with_the_same_losses(tmp_path: Path) -> None:
    """2, then 3, then 1 rank; and the plain model in a plain process reads what they saved."""
    losses: list[float] = []
    for size, start, stop, dense in ((2, 0, 3, "replicate"), (3, 3, 6, "shard"), (1, 6, 9, "replicate")):
        found = run_ranks(train, size, folder=str(tmp_path), start=start, stop=stop, dense=dense)
        assert all(one == found[0] for one in found)
        losses += found[0]["losses"]
    # The same nine steps in one process without Hecate.
    plain = build("plain", seed=0, dtype=torch.float64, layers=1, experts=4)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    expected = go_on(plain, optimizer, range(9), lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-6
    model = build("plain", seed=3, dtype=torch.float64, layers=1, experts=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    assert hecate.load(tmp_path, model, optimizer).step == 9
    assert state_error(model.state_dict(), plain.state_dict()) < 1e-6
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(float(state["step"]) == 9 for state in optimizer.state.values())
