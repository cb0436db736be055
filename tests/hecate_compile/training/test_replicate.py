"""``policy="replicate"``: any model, also one whose ranks run different code."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from tests.support.parity import error_of
from tests.support.ranks import message_of, run_ranks


class Rows(nn.Module):
    """Experts that are rows of embeddings, and a turn for each that has tokens: nothing here can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Embedding(6, 8), nn.Embedding(6, 8)
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            (at,) = torch.where(chosen == expert)
            ids = chosen[at]
            score = (self.down(ids) * tokens[at]).sum(-1, keepdim=True)
            out = out.index_add(0, at, score * self.up(ids) * self.scale[expert])
        if chosen[0] > 2:
            out = out * self.scale.sum()
        return out.square().mean()


def build() -> Rows:
    torch.manual_seed(0)
    return Rows()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank has other experts, and another number of them."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    chosen = torch.randint(0, 2, (9,), generator=generator) + 3 * rank
    return torch.randn(9, 8, generator=generator), chosen


def train() -> dict[str, Any]:
    reference, worst = build(), 0.0
    model = hecate.compile(build(), hecate.Config(policy="replicate", backend="aot_eager"))
    rank, size = dist.get_rank(), dist.get_world_size()
    for accumulated in (1, 2):
        model.zero_grad()
        reference.zero_grad()
        for part in range(accumulated):
            hecate.set_requires_gradient_sync(model, part == accumulated - 1)
            model(*batch(part, rank)).backward()
            sum(reference(*batch(part, other)) for other in range(size)).div(size).backward()
        for (name, mine), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
            if wanted.grad is None or mine.grad is None:
                assert wanted.grad is mine.grad, name
            else:
                worst = max(worst, error_of(mine.grad, wanted.grad))
    state = model.state_dict()
    return {
        "worst": worst,
        "text": str(hecate.explain(model)),
        "stats": str(hecate.stats(model)),
        "pickled": message_of(lambda: pickle.dumps(model)),
        "whole": all(torch.equal(state[name], value) for name, value in reference.state_dict().items()),
    }


@pytest.mark.distributed
def test_ranks_may_run_different_code() -> None:
    for result in run_ranks(train, 2):
        assert result["worst"] < 1e-5 and result["whole"]
        assert "policy replicate" in result["text"]
        assert "TypeError" in result["pickled"] and "cannot be copied or pickled" in result["pickled"]


def test_one_process() -> None:
    model, reference = build(), build()
    hecate.compile(model, hecate.Config(policy="replicate", backend="aot_eager"))
    assert torch.allclose(model(*batch(0, 1)), reference(*batch(0, 1)))


@pytest.mark.parametrize("other", [{"dense": "shard"}, {"experts": ("*.experts",)}])
def test_what_does_not_go_with_it(other: Any) -> None:
    with pytest.raises(ValueError, match="keeps the whole model on every rank; leave"):
        hecate.Config(policy="replicate", **other)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.linear(tokens)
        if out.max() > 100:
            out = out / 2
        return out.sin()


def graphs_by_depth() -> list[int]:
    found = []
    for depth in (1, 4):
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Branch() for _ in range(depth)])
        model = hecate.compile(blocks, hecate.Config(policy="replicate", backend="aot_eager"))
        for _ in range(2):
            model(torch.randn(3, 8, requires_grad=True)).sum().backward()
        found.append(len(hecate.explain(model).graphs))
    return found


@pytest.mark.distributed
def test_blocks_share_graphs_as_under_torch_compile() -> None:
    for few, many in run_ranks(graphs_by_depth, 2):
        assert few == many > 1
