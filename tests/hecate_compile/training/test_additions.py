"""Parameters that are added after hecate.compile are trained like all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import rank_and_size, step_and_compare
from tests.support.ranks import message_of, run_ranks


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter around it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def small() -> PlainLanguageModel:
    torch.manual_seed(0)
    return PlainLanguageModel(layers=1, experts=4)


def adapt(model: PlainLanguageModel, seed: int) -> None:
    torch.manual_seed(seed)
    model.blocks[0].router = Adapted(model.blocks[0].router)
    model.head.bias = nn.Parameter(torch.randn(model.head.out_features))


def resize(model: PlainLanguageModel, seed: int) -> None:
    """As transformers' resize_token_embeddings: another embedding module, and the head tied to it anew."""
    torch.manual_seed(seed)
    model.embedding = nn.Embedding(120, model.embedding.embedding_dim)
    model.head.weight = model.embedding.weight


def added() -> dict[str, Any]:
    """On one rank."""
    dist.init_process_group("gloo")
    rank, _ = rank_and_size()
    found = {}
    for name, change in {"adapter": adapt, "resized": resize}.items():
        reference, model = small(), small()
        hecate.compile(model, hecate.Config(backend="aot_eager"))
        before = step_and_compare(model, reference, batch(0)).gradient
        # Every rank makes other values; rank 0's win.
        change(model, seed=7 + rank)
        change(reference, seed=7)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference)]
        after = []
        for step in range(3):
            after.append(step_and_compare(model, reference, batch(step)).gradient)
            for optimizer in optimizers:
                optimizer.step()
        found[name] = {"before": before, "after": max(after), "graphs": len(hecate.explain(model).graphs)}
    model.norms[0].extra = nn.Parameter(torch.zeros(3 + rank))
    found["differ"] = message_of(lambda: model(batch(0), batch(0)))
    return found


@pytest.mark.distributed
def test_added_parameters_train_as_in_one_process() -> None:
    for result in run_ranks(added, 2):
        for name in ("adapter", "resized"):
            assert result[name]["before"] < 1e-5
            assert result[name]["after"] < 1e-5, name
            assert result[name]["graphs"] == 2, name
        assert "ranks disagree on the parameters that were added after hecate.compile" in result["differ"]
        assert "norms.0.extra [3]" in result["differ"] and "norms.0.extra [4]" in result["differ"]
