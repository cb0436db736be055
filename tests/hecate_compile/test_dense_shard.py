"""``Config(dense="shard")``: the same training with dense parameters in equal parts on all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.ops.dense import DenseShard
from hecate.wrap.shard import shard_of
from tests.hecate_compile.test_parity import REPLICAS, measure
from tests.support.adversaries import Moving
from tests.support.extent import ALL
from tests.support.models import VOCABULARY, PlainLanguageModel, batch, build
from tests.support.parity import (
    clear_gradients,
    compare,
    compiled_on_free_links,
    dense_gathers,
    rank_and_size,
    run_step,
    state_error,
    step_and_compare,
)
from tests.support.ranks import message_of, run_ranks


def _compiled(model: nn.Module, **options: Any) -> nn.Module:
    return compiled_on_free_links(model, dense="shard", **options)


# --- two ranks, in one launch ---


def gathered_again(checkpointing: bool, layers: int) -> dict[str, Any]:
    """Two steps, and the gathers of the forward and of the backward of a third one."""
    reference, model = (build("qwen3_moe", layers=layers) for _ in range(2))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    reference.train()
    _compiled(model)
    worst = max(step_and_compare(model, reference, batch(step)).gradient for step in range(2))
    rank, size = rank_and_size()
    mine = batch(2).chunk(size)[rank]
    with dense_gathers() as forward:
        loss = model(input_ids=mine, labels=mine)["loss"]
    with dense_gathers() as backward:
        loss.backward()
    (graph,) = hecate.explain(model).graphs
    rewritten = {record.name: record.rewritten for record in graph.passes}
    return {"worst": worst, "rewritten": rewritten, "gathers": [len(forward), len(backward)]}


def partly_frozen() -> dict[str, Any]:
    """Frozen matrices beside trained ones in every block."""
    reference = build("qwen3_moe", layers=1)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("experts" in name or "norm" in name or "k_proj" in name)
    model = build("qwen3_moe", layers=1)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    _compiled(model)
    whole = [name for name, p in model.named_parameters() if shard_of(p) is None]
    frozen = [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    difference = step_and_compare(model, reference, batch(0))
    return {"worst": difference.gradient, "whole": whole, "frozen": frozen}


class WithExtras(PlainLanguageModel):
    """A scalar, a single row, a recurrent module, and a part that Dynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__(layers=1, experts=4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1, 32))
        self.filter = nn.Linear(32, 32)
        self.memory = nn.LSTM(32, 32)

    @torch.compiler.disable
    def untraced(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.filter(hidden)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.untraced(self.embedding(input_ids) * self.scale + self.shift)
        assert self.head.weight.shape == (VOCABULARY, 32)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden))
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def extras() -> dict[str, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(WithExtras())
    model, reference = _compiled(models[0]), models[1]
    worst = max(step_and_compare(model, reference, batch(step)).gradient for step in range(2))
    whole = [name for name, p in model.named_parameters() if shard_of(p) is None]
    outside = list(model.head.weight.shape)
    used = message_of(lambda: model.norms[0].weight.square().sum().backward())
    model.norms[0].weight = nn.Parameter(torch.zeros(32))
    replaced = message_of(model.state_dict)
    return {"worst": worst, "whole": whole, "outside": outside, "used": used, "replaced": replaced}


def everything() -> dict[str, Any]:
    """On one rank, in one launch."""
    return {
        # The plain model, whose loop over experts is rewritten, is in test_inductor.
        "parity": measure("gpt_oss", dense="shard", layers=1, **REPLICAS),
        "without the pass": measure(
            "plain",
            dense="shard",
            layers=1,
            disable_passes=["bucket_gathers"],
            changes={"experts": 4},
            **REPLICAS,
        ),
        "gathered": gathered_again(checkpointing=False, layers=2),
        "gathered with checkpoints": gathered_again(checkpointing=True, layers=1),
        "frozen": partly_frozen(),
        "extras": extras(),
    }


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["parity", "without the pass"])
def test_equals_one_process(case: str) -> None:
    for found in (rank[case] for rank in results()):
        assert found["loss"] < 1e-5
        assert found["gradient"] < 1e-5, found["worst"]
        assert (found["graphs"], found["breaks"], found["skipped"]) == (1, 0, [])
        assert found["rewritten"]["exchange_rows"] == 1
        assert found["rewritten"]["bucket_gradients"] == 0, "nothing dense is left whole"
        # Embedding, the block, last norm and head.
        assert found["rewritten"].get("bucket_gathers", 0) == (2 if case == "parity" else 0)


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "layers"), [("gathered", 2), ("gathered with checkpoints", 1)])
def test_the_backward_gathers_again(case: str, layers: int) -> None:
    for result in (rank[case] for rank in results()):
        assert result["worst"] < 1e-5
        assert result["rewritten"]["exchange_rows"] == layers
        assert result["rewritten"]["bucket_gathers"] == layers + 1
        assert result["gathers"] == [layers + 2, layers + 1], "embedding, layers, head; all but the embedding again"


@pytest.mark.distributed
def test_frozen_parameters_are_sharded_too() -> None:
    for result in (rank["frozen"] for rank in results()):
        assert result["worst"] < 1e-5
        assert result["whole"] == []
        assert result["frozen"]


@pytest.mark.distributed
def test_untraced_reads_and_parameters_that_stay_whole() -> None:
    for result in (rank["extras"] for rank in results()):
        assert result["worst"] < 1e-5
        recurrent = [f"memory.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        assert result["whole"] == ["scale", "shift", *recurrent]
        assert result["outside"] == [VOCABULARY // 2, 32]
        assert result["used"].startswith("UntracedReadError") and "norms.0.weight was not averaged" in result["used"]
        assert "norms.0.weight is no longer the shard" in result["replaced"]


# --- training ---


def train() -> dict[str, Any]:
    """Tied embeddings, owners that change, evaluation between, accumulation, clipping, decay by dimension, AdamW."""
    options = {"tie_word_embeddings": True, "num_experts": 5, "layers": 1}
    reference = build("qwen3_moe", **options)
    model = _compiled(build("qwen3_moe", **options), policy=Moving(reshard_every=2))
    optimizers = []
    for candidate in (model, reference):
        matrices = [p for p in candidate.parameters() if p.ndim > 1]
        vectors = [p for p in candidate.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        # A large eps: second moments near zero would turn rounding into steps of full size.
        optimizers.append(torch.optim.AdamW(groups, lr=1e-2, eps=1e-3))
    rank, size = rank_and_size()
    norms, logits_error, gradient = [], 0.0, 0.0
    for step in range(6):
        clear_gradients(model, reference)
        for micro in range(2):
            ids = batch(10 * step + micro)
            hecate.set_requires_gradient_sync(model, micro == 1)
            loss = run_step(model, ids)
            expected = reference(input_ids=ids, labels=ids)["loss"]
            expected.backward()
        gradient = max(gradient, compare(model, loss, reference, expected.detach()).gradient)
        for order in (2.0, float("inf")):
            ours = hecate.clip_grad_norm_(model, 1e9, order)
            theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9, order)
            norms.append(abs(float(ours) / float(theirs) - 1))
        hecate.clip_grad_norm_(model, 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            mine = ids.chunk(size)[rank]
            found, expected = model(input_ids=mine)["logits"], reference(input_ids=mine)["logits"]
            logits_error = max(logits_error, float((found - expected).abs().max() / expected.abs().max()))
    state = model.state_dict()
    weights = state_error(state, reference.state_dict(), relative=True)
    padding = max(
        float(p[shard_of(p).counts[rank] :].detach().abs().sum())
        for p in model.parameters()
        if isinstance(shard_of(p), DenseShard)
    )
    own_state = {
        value.shape == p.shape
        for p, values in optimizers[0].state.items()
        for value in values.values()
        if value.ndim and isinstance(shard_of(p), DenseShard)
    }
    return {
        "gradient": gradient,
        "norm": max(norms),
        "logits": logits_error,
        "weights": weights,
        "padding": padding,
        "own_state": list(own_state),
        "graphs": len(hecate.explain(model).graphs),
        "tied_state": state["lm_head.weight"] is state["model.embed_tokens.weight"],
        "moves": len(compiled_model_of(model, "test").owner_mover.moves),
        "parameters": len(list(model.parameters())) - len(list(reference.parameters())),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3] if ALL else [3])
def test_training_equals_one_process(size: int) -> None:
    """On three ranks most shards have padding."""
    for result in run_ranks(train, size):
        # The first step is as exact as ever; later ones carry what AdamW made of rounding.
        assert result["gradient"] < 1e-4
        assert result["norm"] < 1e-5
        assert result["logits"] < 1e-4
        assert result["weights"] < 1e-4
        assert result["padding"] == 0
        assert result["own_state"] == [True]
        assert result["graphs"] == 2, "with gradients and without"
        assert result["tied_state"]
        assert result["moves"] == 2
        assert result["parameters"] == 0, "tied parameters are one"


# --- options ---


def test_one_process_keeps_everything_whole() -> None:
    model = _compiled(build("plain", layers=1))
    assert all(not isinstance(shard_of(p), DenseShard) for p in model.parameters())
    reference = build("plain", layers=1)
    assert step_and_compare(model, reference, batch(0)).gradient < 1e-5


def differing_options() -> str:
    dist.init_process_group("gloo")
    kind = "shard" if rank_and_size()[0] else "replicate"
    return message_of(lambda: hecate.compile(build("plain"), hecate.Config(backend="aot_eager", dense=kind)))


@pytest.mark.distributed
def test_ranks_with_different_options() -> None:
    for message in run_ranks(differing_options, 2):
        assert message.startswith("DisagreementError") and "option dense = 'shard'" in message
