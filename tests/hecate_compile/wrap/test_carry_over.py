"""Hooks, attributes and frozen experts: what hangs on a parameter before compile is there after it, or refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from torch.nn.utils import parametrizations, prune

import hecate
from hecate.wrap.find_experts import find_experts
from hecate.wrap.loops.experts_without_rows import minds_no_rows
from hecate.wrap.shard import shard_of
from tests.hecate_compile.wrap.test_stack_experts import Expert, ListMoE
from tests.support.adversaries import Anything
from tests.support.models import PlainLanguageModel, PlainMoE, batch
from tests.support.parity import error_of, state_error, step_both
from tests.support.ranks import message_of, run_ranks

_EAGER = hecate.Config(backend="aot_eager")


class GuardedMoE(ListMoE):
    """Leaves out experts without rows."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        out = torch.zeros_like(tokens)
        for number in range(len(self.experts)):
            rows, choice = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, self.experts[number](tokens[rows]) * weights[rows, choice, None])
        return out.view_as(hidden)


class CountingExpert(Expert):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__(hidden, intermediate)
        self.register_buffer("used", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.used += 1
        return super().forward(rows)


class AveragingExpert(Expert):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__(hidden, intermediate)
        self.register_buffer("seen", torch.zeros(intermediate))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.w2(self.note(silu(self.w1(rows)) * self.w3(rows)))

    def note(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * h.mean(0))
        return h


class ScalingExpert(Expert):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.w1.weight / self.w1.weight.abs().amax()
        scale = rows.abs().amax().clamp_(min=1e-3)
        return self.w2(silu(rows / scale @ weight.t()).mul_(scale))


class HarmlessExpert(Expert):
    """Changes and reduces what is there without rows, or its own."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        norm = self.w1.weight.norm(dim=1).mean()
        h = self.w1(rows).clamp_(max=9.0)
        h = h.mul_(h.pow(2).mean(-1, keepdim=True)) / norm
        h.relu_()
        return self.w2(h).add_(self.w2.bias.max())


def of(expert: type[Expert]) -> type[nn.Module]:
    """A layer that leaves out experts without rows, which are of this kind."""
    return type("Layer", (GuardedMoE,), {"expert": expert})


def small(kind: Any = PlainMoE) -> PlainLanguageModel:
    torch.manual_seed(0)
    return PlainLanguageModel(kind, hidden=16, layers=1, experts=4)


def hang(model: nn.Module, dense: str) -> tuple[list[float], list[Any]]:
    """Hooks on what compile replaces: a mask, norms, in place, one that is taken off again; and attributes."""
    seen: list[float] = []
    handles = []
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if dense == "replicate" and not ("experts." in name or ".w_" in name or ".b_" in name):
            continue
        mask = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(number)).round()
        parameter.register_hook(lambda g, mask=mask: g * mask)
        parameter.register_hook(lambda g: g / (0.1 + g.norm()))
        parameter.register_hook(lambda g: seen.append(float(g.norm())))
        parameter.register_hook(halve)
        handles.append(parameter.register_hook(lambda g: g * 100))
        parameter.lr_scale, parameter._no_weight_decay = 0.5, parameter.ndim  # type: ignore[attr-defined]
    return seen, handles


def halve(gradient: torch.Tensor) -> None:
    gradient.mul_(0.5)


def train() -> dict[str, Any]:
    """On one rank."""
    found: dict[str, Any] = {}
    for kind, dense in ((PlainMoE, "replicate"), (ListMoE, "shard")):
        models = small(kind), small(kind)
        model, reference = models
        (seen, handles), (expected_seen, others) = (hang(m, dense) for m in models)
        config = hecate.Config(backend="aot_eager", dense=dense, policy=Anything(reshard_every=2))  # type: ignore[arg-type]
        hecate.compile(model, config)
        for handle in (*handles, *others):
            handle.remove()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        loss = 0.0
        for step in range(5):
            loss = max(loss, step_both(model, reference, batch(step)))
            for optimizer in optimizers:
                optimizer.step()
        shards = [p for p in model.parameters() if shard_of(p) is not None]
        pairs = zip(sorted(seen), sorted(expected_seen), strict=True)
        found[f"{kind.__name__} {dense}"] = {
            "loss": loss,
            "weights": state_error(model.state_dict(), reference.state_dict()),
            "seen": max(abs(a - b) for a, b in pairs),
            "calls": len(seen),
            "attributes": all(vars(p).get("lr_scale") == 0.5 and "_no_weight_decay" in vars(p) for p in shards),
        }
    return found


def refused() -> dict[str, str]:
    """Messages and warnings on one rank, of what needs two."""
    found = {}
    model = small(GuardedMoE)
    parametrizations.weight_norm(model.blocks[0].experts[1].w1)
    for expert in model.blocks[0].experts:
        if expert is not model.blocks[0].experts[1]:
            parametrizations.weight_norm(expert.w1)
    found["parametrized"] = message_of(lambda: hecate.compile(model, _EAGER))
    model = small(ListMoE)
    if torch.distributed.get_rank() == 0:
        model.blocks[0].experts[1].w1.weight.register_hook(torch.abs)
    found["one rank"] = message_of(lambda: hecate.compile(model, _EAGER))
    return found


@cache
def trained() -> list[dict[str, Any]]:
    return run_ranks(train, 2)


@cache
def told() -> list[dict[str, str]]:
    return run_ranks(refused, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["PlainMoE replicate", "ListMoE shard"])
def test_hooks_and_attributes_stay(kind: str) -> None:
    for result in (rank[kind] for rank in trained()):
        assert result["loss"] < 1e-5 and result["weights"] < 1e-5
        assert result["seen"] < 1e-4 and result["calls"]
        assert result["attributes"]


TOLD = {
    "parametrized": ("blocks.0.experts.0.w1.weight is parametrized by _WeightNorm",),
    "one rank": ("blocks.0.experts.1.w1.weight: 1 gradient hooks",),
}


@pytest.mark.distributed
@pytest.mark.parametrize("case", TOLD)
def test_what_is_refused_on_all_ranks(case: str) -> None:
    for rank in told():
        assert all(words in rank[case] for words in TOLD[case]), rank[case]


def refusal(model: nn.Module) -> str:
    return message_of(lambda: hecate.compile(model, _EAGER))


def test_what_is_bound_to_the_whole_parameter_is_refused() -> None:
    model = small()
    model.blocks[0].w_in.register_post_accumulate_grad_hook(hang)
    assert "blocks.0.w_in has the hook hang from register_post_accumulate_grad_hook" in refusal(model)
    model = small()
    model.blocks[0].w_in.mask = torch.ones_like(model.blocks[0].w_in)
    assert "blocks.0.w_in has the attribute 'mask'" in refusal(model)


def test_pruned_experts_and_a_loop_in_one_process() -> None:
    model = small(ListMoE)
    for expert in model.blocks[0].experts:
        prune.random_unstructured(expert.w1, "weight", amount=0.5)
    assert refusal(model) == "no error"
    model, reference = small(of(CountingExpert)), small(of(CountingExpert))
    hecate.compile(model, _EAGER)
    assert error_of(model(batch(0))["logits"], reference(batch(0))["logits"]) < 1e-5
    used, expected = ([int(e.used) for e in m.blocks[0].experts] for m in (model, reference))
    assert used == expected


def test_what_experts_may_do_without_rows() -> None:
    for kind, harmless in ((HarmlessExpert, True), (Expert, True), (CountingExpert, False), (AveragingExpert, False)):
        (experts,), _ = find_experts(small(of(kind)))
        assert (minds_no_rows(experts) is None) == harmless
    model = small(GuardedMoE)
    for expert in model.blocks[0].experts:
        expert.w3 = nn.Sequential(expert.w3, nn.BatchNorm1d(16))
    (experts,), _ = find_experts(model)
    assert "BatchNorm1d, whose statistics" in (minds_no_rows(experts) or "")
