"""What users have in and around a forward: collectives of their own, evaluation, parameters without gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.policy import Policy
from tests.support.adversaries import Anything
from tests.support.models import PlainLanguageModel, batch, build
from tests.support.parity import clear_gradients, compare, error_of, rank_and_size, state_error, step_and_compare
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.test_user_code"


def small(kind: type[PlainLanguageModel] = PlainLanguageModel, **options: Any) -> PlainLanguageModel:
    torch.manual_seed(0)
    return kind(**({"hidden": 16, "layers": 2, "experts": 4} | options))


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return hecate.compile(model, hecate.Config(**({"backend": "aot_eager", "policy": Anything()} | options)))


class Balanced(PlainLanguageModel):
    """A loss for balance over the global batch: what ranks did is added up inside the forward, in every layer."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden, balance = self.embedding(input_ids), 0.0
        for norm, block in zip(self.norms, self.blocks, strict=True):
            normed = norm(hidden)
            scores = block.router(normed).softmax(-1).flatten(0, 1)
            share = torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float().mean(0)
            if dist.is_initialized() and self.sums:
                share = share.clone()
                dist.all_reduce(share)
                share = share / dist.get_world_size()
            balance = balance + (share * scores.mean(0)).sum()
            hidden = hidden + block(normed)
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return {"loss": loss + balance, "logits": logits}


class Odd(Balanced):
    """A parameter read only without gradients, one that is multiplied by nothing differentiable, one never used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        width = self.embedding.embedding_dim
        self.indexer = nn.Linear(width, width)
        self.steps = nn.Parameter(torch.randn(width))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(input_ids, labels)
        with torch.no_grad():
            chosen = self.indexer(self.embedding(input_ids)).argmax(-1)
        out["loss"] = out["loss"] * (1 + (self.steps > 0).float().mean()) * (chosen >= 0).float().mean()
        return out


def balance_and_odd() -> dict[str, Any]:
    found = {}
    for dense, layers in (("replicate", 2), ("shard", 1)):
        model, reference = small(Odd, layers=layers), small(Odd, layers=layers)
        model.sums, reference.sums = True, False
        compiled(model, dense=dense)
        errors = [step_and_compare(model, reference, batch(step)) for step in range(3)]
        found[dense] = {
            "worst": max(max(e.gradient, e.loss) for e in errors),
            "graphs": len(hecate.explain(model).graphs),
            "none": sorted(name for name, p in model.named_parameters() if p.grad is None),
        }
    return found


def inference() -> dict[str, Any]:
    """Evaluation under inference_mode, between steps, with replicas."""
    model, reference = compiled(small(layers=1)), small(layers=1)
    rank, size = rank_and_size()
    worst, replicas = 0.0, 0
    for step in range(3):
        worst = max(worst, step_and_compare(model, reference, batch(step)).gradient)
        ids = batch(10 + step).chunk(size)[rank]
        with torch.inference_mode():
            error = error_of(model(ids)["logits"], reference(ids)["logits"])
        worst = max(worst, error)
        replicas += sum(layer.replicas for layer in hecate.stats(model).layers)
    return {"worst": worst, "replicas": replicas}


def autocast() -> dict[str, Any]:
    """bfloat16 by autocast, beside one process that does the same with every rank's batch."""
    model, reference = compiled(build("qwen3_moe", layers=1)), build("qwen3_moe", layers=1)
    rank, size = rank_and_size()
    parts = batch(0).chunk(size)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=parts[rank], labels=parts[rank]).loss
        losses = [reference(input_ids=part, labels=part).loss for part in parts]
    loss.backward()
    (sum(losses) / size).backward()
    exact = build("qwen3_moe", layers=1)
    (sum(exact(input_ids=part, labels=part).loss for part in parts) / size).backward()
    difference = compare(model, loss.detach(), reference, (sum(losses) / size).detach())
    rounding = max(
        float((p.grad - q.grad).abs().max() / q.grad.abs().max())
        for p, q in zip(reference.parameters(), exact.parameters(), strict=True)
    )
    return {
        "worst": difference.gradient,
        "loss": difference.loss,
        "rounding": rounding,
        "rewritten": len(hecate.stats(model).layers),
        "graphs": len(hecate.explain(model).graphs),
    }


class Shared(PlainLanguageModel):
    """Both blocks have the same experts, and one matrix of them is an attribute of the model too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        first, second = self.blocks
        second.w_in, second.w_out = first.w_in, first.w_out
        self.also = first.w_in

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(input_ids, labels)
        out["loss"] = out["loss"] + 1e-3 * self.also.square().sum()
        return out


def shared() -> dict[str, Any]:
    """Owners that move, two optimizer steps, and a state dict."""
    model = compiled(small(Shared), policy=Anything(reshard_every=1))
    reference = small(Shared)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    worst = 0.0
    for step in range(4):
        worst = max(worst, step_and_compare(model, reference, batch(step)).gradient)
        for optimizer in optimizers:
            optimizer.step()
    state, expected = model.state_dict(), reference.state_dict()
    model.load_state_dict(expected)
    worst = max(worst, step_and_compare(model, reference, batch(9)).gradient)
    return {
        "worst": worst,
        "weights": state_error(state, expected),
        "parameters": len(list(model.parameters())) - len(list(reference.parameters())),
        "tied": state["blocks.0.w_in"] is state["blocks.1.w_in"] is state["also"],
        "layers": len(hecate.stats(model).layers),
    }


def around() -> dict[str, Any]:
    """DistributedDataParallel around a compiled model, and around a module that contains one."""
    model, reference = compiled(small(layers=1)), small(layers=1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    clear_gradients(model, reference)
    rank, size = rank_and_size()
    for micro in range(2):
        ids = batch(micro)
        with wrapped.no_sync() if micro == 0 else nullcontext():
            loss = wrapped(ids.chunk(size)[rank], ids.chunk(size)[rank])["loss"]
            loss.backward()
        if micro == 0:
            local = model.norms[0].weight.grad.clone()
        expected = reference(ids, ids)["loss"]
        expected.backward()
    error = compare(model, loss.detach(), reference, expected.detach()).gradient
    everyone = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(everyone, local)
    outer = nn.Sequential(model)
    before = [p.detach().clone() for p in model.parameters()]
    message = message_of(lambda: nn.parallel.DistributedDataParallel(outer))
    plain = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    return {
        "same": wrapped is model,
        "error": error,
        "local": not torch.equal(*everyone),
        "message": message,
        "kept": all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)),
        "plain": type(plain).__name__,
    }


class OwnerPerRank(Anything):
    """A wrong policy: rank 1 would like other owners."""

    replicates = False

    def __init__(self) -> None:
        super().__init__(reshard_every=1)

    def place(self, layer: Any) -> Any:
        return Policy.place(self, layer)

    def choose_owners(self, layers: Any) -> Any:
        moved = [Owners(tuple(reversed(layer.owners.ranks)), 2) for layer in layers]
        return moved if rank_and_size()[0] else [layer.owners for layer in layers]


def other_owners() -> str:
    model = compiled(small(layers=1), policy=OwnerPerRank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            mine = batch(step)
            model(mine, mine)["loss"].backward()
            optimizer.step()

    return message_of(train)


def everything() -> dict[str, Any]:
    """On one rank, in one launch."""
    return {
        "ddp": around(),
        "balance and odd": balance_and_odd(),
        "inference": inference(),
        "owners": other_owners(),
        "shared": shared(),
        "autocast": autocast(),
    }


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(f"{_HERE}:everything", 2)


pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("dense", ["replicate", "shard"])
def test_collectives_in_the_forward_and_parameters_without_a_gradient(dense: str) -> None:
    for result in (rank["balance and odd"][dense] for rank in results()):
        assert result["worst"] < 1e-5
        assert result["graphs"] == 1
        assert result["none"] == ["indexer.bias", "indexer.weight", "steps", "unused"]


def test_inference_mode_with_replicas() -> None:
    for result in results():
        assert result["inference"]["worst"] < 1e-5
        assert result["inference"]["replicas"] > 0


def test_autocast() -> None:
    for result in (rank["autocast"] for rank in results()):
        # No further from one process under autocast than that is from float32.
        assert result["worst"] < result["rounding"] < 0.2 and result["loss"] < 1e-3
        assert (result["rewritten"], result["graphs"]) == (1, 1)


def test_data_parallel_around_it() -> None:
    for result in (rank["ddp"] for rank in results()):
        assert result["same"] and result["error"] < 1e-5
        assert result["local"], "no_sync left gradients as they are"
        assert "contains a compiled model (0)" in result["message"] and "HecateStrategy" in result["message"]
        assert result["kept"], "before anything was copied"
        assert result["plain"] == "DistributedDataParallel", "others are wrapped as ever"


def test_ranks_that_choose_other_owners_are_told() -> None:
    for result in results():
        assert result["owners"].startswith("DisagreementError")
        assert "what moves when experts change owners" in result["owners"] and "blocks.0" in result["owners"]


def test_experts_that_two_modules_share_stay_shared() -> None:
    for result in (rank["shared"] for rank in results()):
        assert result["worst"] < 1e-5 and result["weights"] < 1e-5
        assert result["parameters"] == 0
        assert result["tied"]
        assert result["layers"] == 1, "experts of one layer, which is called by two modules"
