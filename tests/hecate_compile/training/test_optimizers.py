"""Optimizers, clipping and GradScaler on shards do what torch does on whole tensors; one rank has no experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.placement.owners import Owners
from hecate.wrap.shard import shard_of
from tests.support.models import batch, build
from tests.support.parity import clear_gradients, rank_and_size, run_step
from tests.support.ranks import run_ranks

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def on_shards(dense: Any) -> dict[str, Any]:
    """Everything with one compiled model, one rank of which owns no expert."""
    model = hecate.compile(build("plain", layers=1, experts=4), hecate.Config(backend="aot_eager", dense=dense))
    compiled = compiled_model_of(model, "test")
    compiled.owner_mover.move([(layer, Owners((0,) * 4, compiled.world.size)) for layer in compiled.layers])
    start = {name: value.clone() for name, value in model.state_dict().items()}
    steps = [_gradients(model, number) for number in range(3)]
    found: dict[str, Any] = {"mine": sum(len(p) == 0 for p in model.parameters()), "optimizers": {}, "norms": {}}

    for name, make in _OPTIMIZERS.items():
        model.load_state_dict(start)
        # Each with its own first dimension: fused optimizers take all of a length together.
        ours, whole = make(model.parameters()), _whole_parameters(model, start)
        theirs = make(list(whole.values()))
        for gradients in steps:
            _give(model, gradients)
            for key, parameter in whole.items():
                parameter.grad = gradients[key].clone()
            ours.step()
            theirs.step()
        state = model.state_dict()
        found["optimizers"][name] = all(torch.equal(state[key], value) for key, value in whole.items())

    for order in (1.0, 2.0, 3.0, float("inf")):
        _give(model, steps[0])
        whole = _whole_parameters(model, start)
        # Clipped in place.
        whole_grads = {key: steps[0][key].clone() for key in whole}
        for key, parameter in whole.items():
            parameter.grad = whole_grads[key]
        expected = torch.nn.utils.clip_grad_norm_(whole.values(), 0.01, norm_type=order)
        norm = hecate.clip_grad_norm_(model, 0.01, norm_type=order)
        clipped = _gather(model)
        error = max(float((clipped[key] - grad).abs().max()) for key, grad in whole_grads.items())
        found["norms"][str(order)] = [abs(float(norm / expected) - 1), error]

    found["scaler"] = _scaled(model, start, steps)
    return found


def _scaled(model: nn.Module, start: dict[str, torch.Tensor], steps: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """With a scaler; in the second step one rank's experts alone have an infinite gradient."""
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    scales, changed = [], []
    for number, gradients in enumerate(steps):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        _give(model, {name: 64.0 / 2**number * value for name, value in gradients.items()})
        scaler.scale(torch.zeros(()))
        if number == 1:
            grads = [p.grad for p in model.parameters() if p.grad is not None and p.ndim == 3]
            if rank_and_size()[0] == 0:
                grads[0].view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = model.state_dict()
        changed.append(any(not torch.equal(before[key], after[key]) for key in before))
    return {"scales": scales, "changed": changed}


def _gradients(model: nn.Module, number: int) -> dict[str, torch.Tensor]:
    clear_gradients(model)
    run_step(model, batch(number))
    return _gather(model)


def _gather(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients."""
    found = {}
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        assert parameter.grad is not None
        found[name] = parameter.grad.clone() if shard is None else shard.gather(parameter.grad)
    return found


def _give(model: nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        parameter.grad = gradients[name].clone() if shard is None else shard.slice(gradients[name])


def _whole_parameters(model: nn.Module, start: dict[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(start[name].clone()) for name, _ in model.named_parameters()}


@cache
def _results(dense: str) -> list[dict[str, Any]]:
    return run_ranks(on_shards, 2, dense=dense)


pytestmark = [pytest.mark.distributed, pytest.mark.parametrize("dense", ["replicate", "shard"])]


def test_optimizers_are_exact(dense: str) -> None:
    for rank, found in enumerate(_results(dense)):
        assert (found["mine"] > 0) == (rank == 1), "one rank has no experts"
        assert found["optimizers"] == dict.fromkeys(_OPTIMIZERS, True)


def test_clipping_takes_the_norm_of_the_whole_model(dense: str) -> None:
    for found in _results(dense):
        for order, (norm, gradients) in found["norms"].items():
            assert norm < 1e-6 and gradients < 1e-7, order


def test_scalers_skip_together(dense: str) -> None:
    for found in _results(dense):
        assert found["scaler"] == {"scales": [64.0, 32.0, 32.0], "changed": [True, False, True]}
