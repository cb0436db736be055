"""Two backwards of one forward, as one process has them: kept graphs, and gradients asked for first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hecate
from tests.support.models import batch, build
from tests.support.parity import clear_gradients, compare, rank_and_size
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.test_second_backward"


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids)["loss"]
    return loss


def _twice(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, ids)
    (loss * 0.5).backward(retain_graph=True)
    loss.backward()
    return loss


def _asked_first(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Some gradients are looked at before the backward, as where they weigh one loss against another."""
    loss = _loss(model, ids)
    dense = [p for p in model.parameters() if p.dim() == 1]
    torch.autograd.grad(loss, dense, retain_graph=True)
    loss.backward()
    return loss


def _two_losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(input_ids=ids, labels=ids)
    out["loss"].backward(retain_graph=True)
    out["logits"].square().mean().backward()
    loss: torch.Tensor = out["loss"]
    return loss


def second_backwards() -> dict[str, Any]:
    rank, size = rank_and_size()
    found = {}
    for dense, family, changes in (("replicate", "qwen3_moe", {}), ("shard", "plain", {"experts": 4})):
        model, reference = (build(family, layers=1, **changes) for _ in range(2))
        hecate.compile(model, hecate.Config(backend="aot_eager", dense=dense))
        # The backward is there already when a graph is first kept.
        _loss(model, batch(0).chunk(size)[rank]).backward()
        for step in (_twice, _asked_first, _two_losses):
            clear_gradients(model, reference)
            ids = batch(1)
            ours = step(model, ids.chunk(size)[rank])
            theirs = step(reference, ids)
            difference = compare(model, ours.detach(), reference, theirs.detach())
            found[f"{dense} {step.__name__}"] = max(difference.loss, difference.gradient)
    return found


@pytest.mark.distributed
def test_a_second_backward_is_that_of_one_process() -> None:
    for result in run_ranks(f"{_HERE}:second_backwards", 2):
        assert len(result) == 6 and max(result.values()) < 1e-5, result
