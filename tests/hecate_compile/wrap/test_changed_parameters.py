"""Parameters that a forward changes in place: changed where they are whole, refused where ranks have parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hecate
from tests.support.models import PlainLanguageModel, PlainMoE, batch
from tests.support.parity import Difference, state_error, train_both
from tests.support.ranks import message_of, run_ranks


class NormedRouterMoE(PlainMoE):
    """Keeps the norms of its router's lines, as torchscale's X-MoE."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.router.weight.mul_(1.5 / self.router.weight.norm(dim=1, keepdim=True))
        return super().forward(hidden)


class NormedExpertsMoE(PlainMoE):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w_in.div_(self.w_in.norm())
        return super().forward(hidden)


class UntracedMoE(NormedExpertsMoE):
    """The same where no graph has it."""

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)


class BoundedModel(PlainLanguageModel):
    """Scales the lines of its embedding down that it reads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.embedding.max_norm = 0.5


def _models(moe: Any, kind: Any = PlainLanguageModel, **options: Any) -> list[PlainLanguageModel]:
    """A compiled model and what it is compared with."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(kind(moe, layers=1, experts=2))
    hecate.compile(made[0], hecate.Config(backend="aot_eager", **options))
    return made


def _train(models: list[PlainLanguageModel]) -> tuple[list[Difference], float]:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    found = [train_both(*models, optimizers, batch(step)) for step in range(2)]
    model, reference = models
    return found, state_error(model.state_dict(), reference.state_dict())


def everything() -> dict[str, Any]:
    steps, off = _train(_models(NormedRouterMoE))
    refused = {
        "dense": _models(NormedRouterMoE, dense="shard"),
        "experts": _models(NormedExpertsMoE),
        "in Python": _models(UntracedMoE),
        "max_norm": _models(PlainMoE, BoundedModel, dense="shard"),
        # Each rank changes the lines of its own tokens.
        "drift": _models(PlainMoE, BoundedModel),
    }
    return {
        "error": max(max(step.loss, step.gradient) for step in steps),
        "off": off,
        "refused": {name: message_of(lambda models=models: _train(models)) for name, models in refused.items()},
    }


@pytest.mark.distributed
def test_they_change_on_all_ranks_or_not_at_all() -> None:
    for found in run_ranks(everything, 2):
        assert found["error"] < 1e-5 and found["off"] < 1e-5, found
        told = found["refused"]
        for name in ("dense", "experts", "in Python", "max_norm"):
            assert "in place, of which each rank has a part" in told[name], (name, told)
            assert 'Config(dense="replicate")' in told[name], (name, told)
        assert "self.router.weight.mul_(" in told["dense"] and "self.w_in.div_(self.w_in.norm())" in told["experts"]
        assert "ranks have other values of 1 of the" in told["drift"], told
