"""``Config(balance_loss="global")``: the load-balancing loss of a batch on ranks is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hecate
from benchmarks.families.models import build
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, PlainMoE, batch
from tests.support.parity import clear_gradients, compare
from tests.support.ranks import message_of, run_ranks

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe")
PADDED = (16, 3, 9, 12, 7, 5, 11, 8, 10, 2, 4, 6)


class Balanced(PlainMoE):
    """A layer that keeps its own loss of fractions and means, as Switch Transformers define it."""

    def choose(self, tokens: Tensor) -> Any:
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(self.choices, dim=-1)
        chosen_for = nn.functional.one_hot(chosen, scores.shape[-1]).float().mean(dim=0)
        self.loss = (scores.mean(dim=0).unsqueeze(0) * chosen_for).sum() * scores.shape[-1]
        return weights, chosen


class BalancedModel(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__(Balanced)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = super().forward(input_ids, labels)
        if labels is not None:
            out["loss"] = out["loss"] + 10 * sum(block.loss for block in self.blocks)
        return out


def made(name: str) -> nn.Module:
    if name == "own":
        torch.manual_seed(0)
        return BalancedModel()
    model = build(name)
    model.router_aux_loss_coef = 10.0
    return model


def inputs(step: int, masked: bool, own: bool) -> dict[str, Any]:
    """A batch, perhaps padded, on some ranks more than on others; all tokens have labels."""
    ids = batch(step, rows=len(PADDED)) % 64
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if masked:
        given["attention_mask"] = (torch.arange(ids.shape[1]) < torch.tensor(PADDED)[:, None]).long()
    return given if own else given | {"output_router_logits": True}


def train(name: str, masked: bool, **options: Any) -> dict[str, Any]:
    """The worst error of two steps, and how different the loss of own tokens is."""
    model, reference, own = made(name), made(name), made(name)
    hecate.compile(model, hecate.Config(backend="aot_eager", balance_loss="global", **options))
    rank, size = dist.get_rank(), dist.get_world_size()
    worst, apart = 0.0, 0.0
    for step in range(2):
        whole = inputs(step, masked, name == "own")
        part = {key: value.chunk(size)[rank] if isinstance(value, Tensor) else value for key, value in whole.items()}
        clear_gradients(model, reference)
        loss = model(**part)["loss"]
        loss.backward()
        expected = reference(**whole)["loss"]
        expected.backward()
        error = compare(model, loss.detach(), reference, expected.detach())
        worst = max(worst, error.loss, error.gradient)
        alone = own(**part)["loss"].detach()
        apart = max(apart, float((alone - loss).abs() / alone))
    records = [p for graph in hecate.explain(model).graphs for p in graph.passes if p.name == "share_fractions"]
    return {"worst": worst, "apart": apart, "shared": sum(record.rewritten for record in records)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "masked"), [(n, m) for n in FAMILIES for m in (False, True)] if ALL else [("mixtral", True)]
)
def test_two_ranks(name: str, masked: bool) -> None:
    for result in run_ranks(train, 2, name=name, masked=masked):
        assert result["worst"] < 2e-6 and result["shared"] == 1, result
        assert result["apart"] > 1e-3, result


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mixtral", "own"] if ALL else ["own"])
def test_three_ranks(name: str) -> None:
    for result in run_ranks(train, 3, name=name, masked=name != "own"):
        assert result["worst"] < 2e-6 and result["shared"] == (1 if name == "mixtral" else 2), result


def without_a_loss() -> str:
    model = hecate.compile(build("mixtral"), hecate.Config(backend="aot_eager", balance_loss="global"))
    ids = batch(0) % 64
    with torch.no_grad():
        model(input_ids=ids)
    return message_of(lambda: model(input_ids=ids, labels=ids))


@pytest.mark.distributed
def test_a_model_without_such_a_loss_is_refused() -> None:
    for said in run_ranks(without_a_loss, 2):
        assert said.startswith(
            'ValueError: hecate: Config(balance_loss="global"), and no load-balancing loss was found'
        )


def test_options_that_do_not_go_with_it() -> None:
    assert "leave balance_loss" in message_of(lambda: hecate.Config(balance_loss="global", policy="replicate"))
    assert "expected one of ('own', 'global')" in message_of(lambda: hecate.Config(balance_loss="all"))
