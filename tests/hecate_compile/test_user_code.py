"""What users have in and around a forward: collectives of their own, evaluation, parameters without gradients."""

from __future__ import annotations

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
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import rank_and_size, step_and_compare
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.test_user_code"


def small(kind: type[PlainLanguageModel] = PlainLanguageModel, **options: Any) -> PlainLanguageModel:
    torch.manual_seed(0)
    return kind(**({"hidden": 16, "layers": 2, "experts": 4} | options))


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    torch._dynamo.reset()
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


class Odd(PlainLanguageModel):
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


def global_balance() -> dict[str, Any]:
    found = {}
    for dense in ("replicate", "shard"):
        model, reference = small(Balanced), small(Balanced)
        model.sums, reference.sums = True, False
        compiled(model, dense=dense)
        errors = [step_and_compare(model, reference, batch(step)) for step in range(3)]
        found[dense] = max(max(e.gradient, e.loss) for e in errors)
        found[f"graphs, {dense}"] = len(hecate.explain(model).graphs)
    return found


def inference() -> dict[str, Any]:
    """Evaluation under inference_mode, between steps, with replicas."""
    model, reference = compiled(small()), small()
    rank, size = rank_and_size()
    worst, replicas = 0.0, 0
    for step in range(3):
        worst = max(worst, step_and_compare(model, reference, batch(step)).gradient)
        ids = batch(10 + step).chunk(size)[rank]
        with torch.inference_mode():
            error = (model(ids)["logits"] - reference(ids)["logits"]).abs().max()
        worst = max(worst, float(error))
        replicas += sum(layer.replicas for layer in hecate.stats(model).layers)
    return {"worst": worst, "replicas": replicas}


def odd() -> dict[str, Any]:
    found = {}
    for dense in ("replicate", "shard"):
        model, reference = compiled(small(Odd, layers=1), dense=dense), small(Odd, layers=1)
        worst = max(step_and_compare(model, reference, batch(step)).gradient for step in range(2))
        none = sorted(name for name, p in model.named_parameters() if p.grad is None)
        found[dense] = {"worst": worst, "none": none}
    return found


def inside_ddp() -> str:
    """DDP around a module that contains a compiled one."""
    dist.init_process_group("gloo")
    outer = nn.Sequential(compiled(small(layers=1, experts=4), policy="static"))
    wrapped = nn.parallel.DistributedDataParallel(outer)
    return message_of(lambda: wrapped(batch(0)))


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
    # First, because it starts torch.distributed itself.
    return {"ddp": inside_ddp(), "balance": global_balance(), "inference": inference(), "odd": odd(),
            "owners": other_owners()}  # fmt: skip


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(f"{_HERE}:everything", 2)


pytestmark = pytest.mark.distributed


def test_collectives_in_the_forward() -> None:
    for result in results():
        for dense in ("replicate", "shard"):
            assert result["balance"][dense] < 1e-5
            assert result["balance"][f"graphs, {dense}"] == 1


def test_inference_mode_with_replicas() -> None:
    for result in results():
        assert result["inference"]["worst"] < 1e-5
        assert result["inference"]["replicas"] > 0


def test_parameters_without_a_gradient_have_none() -> None:
    for result in results():
        for dense in ("replicate", "shard"):
            assert result["odd"][dense]["worst"] < 1e-5
            assert result["odd"][dense]["none"] == ["indexer.bias", "indexer.weight", "steps", "unused"]


def test_ddp_around_a_module_that_contains_it() -> None:
    for result in results():
        assert "inside DistributedDataParallel" in result["ddp"] and "SingleDeviceStrategy" in result["ddp"]


def test_ranks_that_choose_other_owners_are_told() -> None:
    for result in results():
        assert result["owners"].startswith("DisagreementError")
        assert "what moves when experts change owners" in result["owners"] and "blocks.0" in result["owners"]
