"""Parameters that a forward changes in place: changed where they are whole, refused where ranks have parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import embedding

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


class BoundedMoE(PlainMoE):
    """Scales lines of its router down that it reads."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        lines = torch.arange(2, device=hidden.device)
        return super().forward(hidden) + embedding(lines, self.router.weight, max_norm=0.5).sum()


class SeenAgainMoE(PlainMoE):
    """Has a view of its router's weight behind a graph break."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        lines = self.router.weight.t()
        torch._dynamo.graph_break()
        return super().forward(hidden) + (hidden @ lines).sum(-1, keepdim=True)


class CastMoE(PlainMoE):
    """Changes copies of its own making, of a buffer and of what a graph is given behind a break."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("offset", torch.ones(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wanted, hidden, offset = hidden.dtype, hidden.float(), self.offset.to(torch.bfloat16)
        torch._dynamo.graph_break()
        hidden = hidden.to(torch.bfloat16)
        hidden += offset.add_(1)
        return super().forward(hidden.to(wanted))


def _models(moe: Any, **options: Any) -> list[PlainLanguageModel]:
    """A compiled model and what it is compared with."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(PlainLanguageModel(moe, layers=1, experts=2))
    hecate.compile(made[0], hecate.Config(backend="aot_eager", **options))
    return made


def _train(models: list[PlainLanguageModel]) -> tuple[list[Difference], float]:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    found = [train_both(*models, optimizers, batch(step)) for step in range(2)]
    model, reference = models
    return found, state_error(model.state_dict(), reference.state_dict())


def everything() -> dict[str, Any]:
    trained = {kind.__name__: _train(_models(kind)) for kind in (NormedRouterMoE, SeenAgainMoE)}
    bounded = PlainLanguageModel(layers=1, experts=2)
    bounded.embedding.max_norm = 0.5
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    refused = {
        "dense": _models(NormedRouterMoE, dense="shard"),
        "experts": _models(NormedExpertsMoE),
        "in Python": _models(UntracedMoE),
        "lines": _models(BoundedMoE, dense="shard"),
        "cast": _models(NormedRouterMoE, mixed_precision=half),
    }
    return {
        "errors": {
            name: [off, *(max(step.loss, step.gradient) for step in steps)] for name, (steps, off) in trained.items()
        },
        "refused": {name: message_of(lambda models=models: _train(models)) for name, models in refused.items()},
        "own copies": message_of(lambda: _train(_models(CastMoE, mixed_precision=half))),
        "bounded": message_of(lambda: hecate.compile(bounded)),
    }


@pytest.mark.distributed
def test_they_change_on_all_ranks_or_not_at_all() -> None:
    for found in run_ranks(everything, 2):
        assert all(max(errors) < 1e-5 for errors in found["errors"].values()), found
        told = found["refused"]
        for name, text in told.items():
            assert " in place" in text and "It changes a copy" in text and 'Config(dense="replicate")' in text, name
        assert "self.router.weight.mul_(" in told["dense"] and "self.w_in.div_(self.w_in.norm())" in told["experts"]
        assert found["own copies"] == "no error", found
        assert "embedding has max_norm=0.5" in found["bounded"], found
