"""Many steps: changing routing, extreme routing, optimizers, accumulation, clipping, other lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.shard import shard_of
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import (
    clear_gradients,
    compare,
    compiled_on_free_links,
    error_of,
    rank_and_size,
    run_step,
    step_and_compare,
)
from tests.support.ranks import run_ranks


def fifty_steps() -> dict[str, Any]:
    """Top-1 routing; in some steps every token goes to one expert, so most ranks get no row."""
    reference = build("gpt_oss", layers=1, num_experts_per_tok=1)
    model = compiled_on_free_links(build("gpt_oss", layers=1, num_experts_per_tok=1), policy="static")
    worst, zero_gradients, counted, idle = 0.0, True, True, 0
    for step in range(50):
        ids = batch(step)
        forced = step // 5 % 8 if step % 5 else None
        for candidate in (model, reference):
            for name, parameter in candidate.named_parameters():
                if name.endswith("router.bias"):
                    parameter.data.zero_()
                    if forced is not None:
                        parameter.data[forced] = 1e4
        difference = step_and_compare(model, reference, ids)
        worst = max(worst, difference.gradient, difference.loss)
        if forced is not None:
            layers = hecate.stats(model).layers
            idle += sum(layer.rows.count(0) for layer in layers)
            counted &= all(layer.expert_rows[forced] == ids.numel() == max(layer.rows) for layer in layers)
            counted &= all(layer.bytes_sent[0 if forced > 3 else 1] > 0 for layer in layers)
            for name, parameter in model.named_parameters():
                if name.endswith("experts.down_proj"):
                    experts = shard_of(parameter).experts
                    assert parameter.grad is not None
                    others = [row for row, expert in enumerate(experts) if expert != forced]
                    zero_gradients &= not bool(parameter.grad[others].any())
    return {
        "worst": worst,
        "zero_gradients": zero_gradients,
        "counted": counted,
        "idle_ranks": idle,
        "graphs": len(hecate.explain(model).graphs),
    }


@pytest.mark.distributed
def test_fifty_steps_with_extreme_routing() -> None:
    for result in run_ranks(fifty_steps, 2):
        assert result["worst"] < 1e-5
        assert result["zero_gradients"]
        assert result["counted"]
        assert result["idle_ranks"] == 40
        assert result["graphs"] == 1


def more_ranks_than_experts() -> dict[str, Any]:
    """With replicas, by default."""
    reference = build("qwen3_moe", layers=1, num_experts=3)
    model = compiled_on_free_links(build("qwen3_moe", layers=1, num_experts=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(4):
        ids = batch(step)
        worst = max(worst, step_and_compare(model, reference, ids).gradient)
        optimizer.step()
        reference_optimizer.step()
    (layer,), (graph,) = hecate.stats(model).layers, compiled_model_of(model, "test").backend.graphs
    return {
        "worst": worst,
        "state": len(optimizer.state),
        "parameters": len(list(model.parameters())),
        "replicas": layer.replicas,
        "slots": graph.slots,
    }


@pytest.mark.distributed
def test_more_ranks_than_experts() -> None:
    for result in run_ranks(more_ranks_than_experts, 4):
        # Adam divides by the root of tiny second moments, which magnifies rounding from the second step on.
        assert result["worst"] < 1e-3
        assert result["state"] == result["parameters"]
        assert result["replicas"] > 0 and result["slots"] == 1


def accumulate_and_clip() -> dict[str, Any]:
    """Two local micro-batches, then a synchronized one; the sum is clipped; momentum SGD for three rounds."""
    reference = build("mixtral", layers=1)
    model = compiled_on_free_links(build("mixtral", layers=1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    worst, norms = 0.0, []
    for step in range(3):
        clear_gradients(model, reference)
        for micro in range(3):
            ids = batch(10 * step + micro)
            hecate.set_requires_gradient_sync(model, micro == 2)
            loss = run_step(model, ids)
            expected = reference(input_ids=ids, labels=ids)["loss"]
            expected.backward()
        worst = max(worst, compare(model, loss, reference, expected.detach()).gradient)
        for order in (2.0, float("inf")):
            ours = hecate.clip_grad_norm_(model, 1e9, order)
            theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9, order)
            norms.append(abs(float(ours) / float(theirs) - 1))
        hecate.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        worst = max(worst, compare(model, loss, reference, expected.detach()).gradient)
        for optimizer in optimizers:
            optimizer.step()
    return {"worst": worst, "norm": max(norms)}


@pytest.mark.distributed
def test_accumulation_and_clipping() -> None:
    for result in run_ranks(accumulate_and_clip, 2):
        assert result["worst"] < 1e-5
        assert result["norm"] < 1e-5


def ranks_with_other_weights_and_lengths() -> dict[str, Any]:
    """Rank 0's weights win, and each rank may have sequences of its own length."""
    rank, size = rank_and_size()
    reference = build("olmoe", seed=0, layers=1)
    model = compiled_on_free_links(build("olmoe", seed=rank, layers=1))
    lengths = [16, 11, 7][:size]
    whole = batch(0, rows=2 * size)
    mine = whole.chunk(size)[rank][:, : lengths[rank]]
    loss = model(input_ids=mine, labels=mine)["loss"]
    loss.backward()
    total = 0.0
    for other in range(size):
        theirs = whole.chunk(size)[other][:, : lengths[other]]
        part = reference(input_ids=theirs, labels=theirs)["loss"] / size
        part.backward()
        total += float(part)
    return {"worst": compare(model, loss.detach(), reference, torch.tensor(total)).gradient}


@pytest.mark.distributed
def test_differently_seeded_ranks_and_other_lengths() -> None:
    for result in run_ranks(ranks_with_other_weights_and_lengths, 3 if ALL else 2):
        assert result["worst"] < 1e-5


def generate() -> dict[str, Any]:
    """transformers' own generation: a prompt, then one token at a time with a cache that grows."""
    reference, model = build("qwen3_moe", layers=1).eval(), build("qwen3_moe", layers=1).eval()
    compiled_on_free_links(model)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    prompt = batch(0, rows=2)
    same = torch.equal(model.generate(prompt, **options), reference.generate(prompt, **options))
    return {"same": same, "graphs": len(hecate.explain(model).graphs)}


@pytest.mark.skipif(not ALL, reason="test_other_programs generates, too: with HECATE_TESTS=all")
@pytest.mark.distributed
def test_generate() -> None:
    for result in run_ranks(generate, 2):
        assert result["same"]
        assert result["graphs"] <= 3, "prompt, first token, and one for every later length"


def evaluate_between_steps() -> dict[str, Any]:
    """No-grad forwards and a new sequence length between training steps."""
    reference, model = build("qwen3_moe", layers=1), compiled_on_free_links(build("qwen3_moe", layers=1))
    worst = 0.0
    rank, size = rank_and_size()
    # Of the second length torch makes any length, for evaluation at once.
    for step, lengths in enumerate(((16, 9), (12, 16), (9, 12))):
        training, evaluated = (batch(step, length=length) for length in lengths)
        model.train()
        worst = max(worst, step_and_compare(model, reference, training).gradient)
        model.eval()
        with torch.no_grad():
            mine = evaluated.chunk(size)[rank]
            logits, expected = model(input_ids=mine)["logits"], reference(input_ids=mine)["logits"]
            worst = max(worst, error_of(logits, expected, relative=True))
    return {"worst": worst}


@pytest.mark.distributed
def test_evaluation_and_other_lengths_between_steps() -> None:
    for result in run_ranks(evaluate_between_steps, 2):
        assert result["worst"] < 1e-5
