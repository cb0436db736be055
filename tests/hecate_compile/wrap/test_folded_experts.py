"""Experts in matrices one under the other, ``[E * a, b]``, as DBRX and OLMo-core have them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.find_experts import NoExpertsError, find_experts
from hecate.wrap.loops import make_loops_traceable
from tests.support.adversaries import Anything
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import run_step, state_error, step_and_compare
from tests.support.ranks import run_ranks

E, WIDTH, INNER = 5, 16, 12


class FoldedExperts(nn.Module):
    """Chosen by a mask with a class for a number that no token has, as DBRX does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.w_in, self.w_out = (nn.Parameter(0.2 * torch.randn(E * INNER, WIDTH)) for _ in range(2))

    def forward(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(rows)
        mask = nn.functional.one_hot(chosen, num_classes=E + 1).permute(2, 1, 0)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            number = expert[0]
            choice, token = torch.where(mask[number])
            w_in = self.w_in.view(-1, INNER, WIDTH)[number]
            w_out = self.w_out.view(-1, INNER, WIDTH)[number]
            done = nn.functional.silu(rows[token] @ w_in.T) @ w_out
            out.index_add_(0, token, done * weights[token, choice, None])
        return out


class ChunkedExperts(FoldedExperts):
    """Of the older spelling: matrices are cut before the loop."""

    def forward(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(rows)
        w_in, w_out = (
            [one.squeeze(dim=0) for one in torch.chunk(w.view(E, INNER, WIDTH), E, dim=0)]
            for w in (self.w_in, self.w_out)
        )
        for number in range(E):
            token, choice = torch.where(chosen == number)
            done = nn.functional.silu(rows[token] @ w_in[number].t()) @ w_out[number]
            out = out.index_add(0, token, done * weights[token, choice, None])
        return out


class FoldedMoE(nn.Module):
    kind: type[FoldedExperts] = FoldedExperts

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, E, bias=False)
        self.experts = self.kind()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        return self.experts(rows, weights, chosen).view_as(hidden)


class ChunkedMoE(FoldedMoE):
    kind = ChunkedExperts


def small(kind: Any = FoldedMoE) -> PlainLanguageModel:
    torch.manual_seed(0)
    return PlainLanguageModel(kind, hidden=WIDTH, layers=1, experts=E)


class Twins:
    """A compiled model on every rank, and the same in one process, which do the same."""

    def __init__(self, kind: Any = FoldedMoE, seed: int = 0, **options: Any) -> None:
        self.model, self.reference = small(kind), small(kind)
        config = hecate.Config(backend="aot_eager", policy=Anything(seed=seed, reshard_every=2), **options)
        hecate.compile(self.model, config)
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in self.both]
        self.steps = 0

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.reference

    def step(self) -> float:
        difference = step_and_compare(self.model, self.reference, batch(self.steps))
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1
        return max(difference.loss, difference.gradient, self.error())

    def error(self) -> float:
        return state_error(self.model.state_dict(), self.reference.state_dict())


def exchanging_layers(model: nn.Module) -> int:
    """In the model's first graph."""
    return {one.name: one.rewritten for one in hecate.explain(model).graphs[0].passes}["exchange_rows"]


def train(folder: str) -> dict[str, Any]:
    """On one rank."""
    chunked = Twins(ChunkedMoE, dense="shard")
    off = {"chunked": max(chunked.step() for _ in range(3))}
    twins = Twins()
    off["folded"] = max(twins.step() for _ in range(5))
    hecate.save(folder, twins.model, twins.optimizers[0], step=5)
    state = copy.deepcopy(get_optimizer_state_dict(twins.model, twins.optimizers[0]))
    whole = get_optimizer_state_dict(twins.reference, twins.optimizers[1])["state"]
    wide = {name: moments["exp_avg"] for name, moments in whole.items()}
    off["optimizer state"] = state_error({name: state["state"][name]["exp_avg"] for name in wide}, wide)
    off["went on"] = max(twins.step() for _ in range(2))
    for name, by_dcp in (("loaded", False), ("by DCP", True)):
        again = Twins(seed=7)
        hecate.load(folder, again.model, None if by_dcp else again.optimizers[0])
        if by_dcp:
            set_optimizer_state_dict(again.model, again.optimizers[0], state)
        for number in range(5, 7):
            again.optimizers[0].zero_grad()
            run_step(again.model, batch(number))
            again.optimizers[0].step()
        off[name] = state_error(again.model.state_dict(), twins.reference.state_dict())
    again.model.load_state_dict(twins.reference.state_dict())
    off["given a state dict"] = state_error(again.model.state_dict(), twins.reference.state_dict())
    own = again.model.blocks[0].experts._parameters["w_in"]
    return {
        "off": off,
        "moves": sum(compiled_model_of(twins.model, "test").owner_mover.moves),
        "own": tuple(own.shape),
        "exchanged": [exchanging_layers(one.model) for one in (chunked, twins)],
    }


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_they_train_save_and_load_as_in_one_process(ranks: int, tmp_path: Path) -> None:
    everyone = run_ranks(train, ranks, folder=str(tmp_path))
    for found in everyone:
        assert max(found["off"].values()) < 1e-5, found["off"]
        assert found["exchanged"] == [1, 1] and found["moves"] > 0
    assert sum(found["own"][0] for found in everyone) == E * INNER


def test_they_are_found_by_a_count_and_a_name() -> None:
    (found,), _ = find_experts(small())
    assert (found.num_experts, found.parameters, found.folded) == (E, ("w_in", "w_out"), True)
    assert found.sign == "num_experts = 5, by which w_in, w_out can be divided"


def test_a_router_and_what_cannot_be_divided_are_none() -> None:
    model = small()
    model.blocks[0].experts.num_experts = 7
    with pytest.raises(NoExpertsError, match="no experts found"):
        find_experts(model)


class ExpertsAndNothings(FoldedExperts):
    """A number behind the last expert's stands for doing nothing."""

    def forward(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(rows)
        mask = nn.functional.one_hot(chosen, num_classes=E + 1).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().flatten():
            _choice, token = torch.where(mask[number])
            if number >= E:
                out.index_add_(0, token, rows[token])
                continue
            w_in = self.w_in.view(-1, INNER, WIDTH)[number]
            out.index_add_(0, token, (rows[token] @ w_in.T) @ self.w_out.view(-1, INNER, WIDTH)[number])
        return out


class ExpertsOfAnotherLength(FoldedExperts):
    """What is indexed has a parameter's dtype, and is as long as the mask."""

    def forward(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(rows)
        mask = nn.functional.one_hot(chosen, num_classes=E + 1).permute(2, 1, 0)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().flatten():
            _choice, token = torch.where(mask[number])
            scale = torch.ones(E + 1, dtype=self.w_in.dtype)[number]
            out.index_add_(0, token, rows[token] * scale)
        return out


@pytest.mark.parametrize("kind", [ExpertsAndNothings, ExpertsOfAnotherLength])
def test_turns_behind_the_last_expert_stay_where_they_do_something(kind: type[FoldedExperts]) -> None:
    torch.manual_seed(0)
    module = kind()
    given = torch.randn(6, WIDTH), torch.rand(6, 2), torch.randint(0, E + 1, (6, 2))
    expected = module(*given)
    make_loops_traceable(module, find_experts(module)[0])
    assert torch.equal(module(*given), expected)


def test_a_token_that_chooses_no_expert_is_told() -> None:
    module = FoldedExperts()
    assert "min(mask.shape[0], 5)" in "".join(make_loops_traceable(module, find_experts(module)[0]).diff)
    with pytest.raises(RuntimeError, match="a token has chosen no expert"):
        module(torch.randn(2, WIDTH), torch.rand(2, 2), torch.tensor([[0, 1], [2, E]]))


class TwoLayerRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.proj, self.keys = nn.Parameter(torch.randn(64, 16)), nn.Parameter(torch.randn(32, 64))


class SharedExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up, self.down = nn.Parameter(torch.randn(48, 16)), nn.Parameter(torch.randn(16, 48))


class LayerOfExperts(nn.Module):
    """Folded experts inside, and matrices of its own that all tokens take."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.up, self.gate_up = (nn.Parameter(torch.randn(40, WIDTH)) for _ in range(2))
        self.experts = FoldedExperts()


def test_other_matrices_that_can_be_divided_are_none() -> None:
    model = nn.ModuleDict({"moe_router": TwoLayerRouter(), "shared_expert": SharedExpert(), "moe": LayerOfExperts()})
    (found,), _ = find_experts(model)
    assert found.name == "moe.experts"


def test_one_process_trains_them_too() -> None:
    model, reference = small(), small()
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    difference = step_and_compare(model, reference, batch(0))
    assert max(difference.loss, difference.gradient) < 1e-6
