"""What a rank holds of a model, what full tensors go out and in, and models on the meta device."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hecate.runtime.ops.dense import DenseShard
from hecate.wrap.shard import shard_of
from tests.support.models import VOCABULARY, batch, build, transformers_config
from tests.support.parity import compiled_on_free_links, rank_and_size, run_step, step_and_compare
from tests.support.ranks import message_of, run_ranks

# Five experts have owners with other numbers of them; tied parameters stay one.
OPTIONS: dict[str, Any] = {"tie_word_embeddings": True, "layers": 1, "num_experts": 5}


def alive(shapes: set[torch.Size]) -> int:
    """Tensors of these shapes that something holds."""
    for _ in range(20):
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        found = sum(not isinstance(t, FakeTensor) and t.shape in shapes for t in tensors)
        if not found:
            break
        # gloo's thread may hold what it has just sent for a moment longer.
        time.sleep(0.02)
    return found


def memory(model: nn.Module) -> dict[str, Any]:
    """What is alive of whole experts, embeddings and heads after compile, and after a step."""
    whole = {p.shape for name, p in model.named_parameters() if "experts" in name} | {torch.Size((VOCABULARY, 32))}
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    bound = sum(p.numel() for p in dense) / rank_and_size()[1] + sum(p[0].numel() for p in dense)
    del dense
    compiled_on_free_links(model, dense="shard")
    shards = [p for p in model.parameters() if isinstance(shard_of(p), DenseShard)]
    held = [alive(whole)]
    run_step(model, batch(0))
    held.append(alive(whole))
    return {
        "parameters": sum(p.numel() for p in shards),
        "gradients": sum(p.grad.numel() for p in shards),
        "bound": bound,
        "alive": held,
        "own": {n: list(p.shape) for n, p in model.named_parameters() if n.endswith("down_proj")},
    }


def round_trip(model: nn.Module) -> dict[str, Any]:
    """Full tensors out, full tensors in, wrong shapes refused."""
    reference = build("qwen3_moe", **OPTIONS)
    state, expected = model.state_dict(), reference.state_dict()
    same = list(state) == list(expected) and all(torch.equal(state[k], expected[k]) for k in expected)
    ids = batch(0)

    other = build("qwen3_moe", seed=1, **OPTIONS)
    model.load_state_dict(other.state_dict())
    loaded = all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    loaded &= step_and_compare(model, other, ids).gradient < 1e-5

    model.load_state_dict(expected, assign=True)
    assigned = all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    tied = model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
    error = step_and_compare(model, reference, ids).gradient

    one_process = build("qwen3_moe", seed=2, **OPTIONS)
    one_process.load_state_dict(model.state_dict())
    outputs = torch.equal(one_process(input_ids=ids)["logits"], reference(input_ids=ids)["logits"])
    messages, kept = [], True
    for key, rows in (("model.layers.0.self_attn.q_proj.weight", 11), ("model.layers.0.mlp.experts.down_proj", 2)):
        before = model.state_dict()[key]
        wrong = {**expected, key: before[:rows]}
        messages.append(message_of(lambda wrong=wrong: model.load_state_dict(wrong)))
        kept &= torch.equal(model.state_dict()[key], before)
    return {
        "same": same,
        "loaded": loaded,
        "assigned": assigned,
        "tied": tied,
        "error": error,
        "outputs": outputs,
        "messages": messages,
        "kept": kept,
        "part": list(model.lm_head.state_dict()["weight"].shape),
    }


def memory_and_round_trip() -> dict[str, Any]:
    """On one rank, of one compiled model; memory first, since references hold whole parameters."""
    model = build("qwen3_moe", **OPTIONS)
    return {"memory": memory(model), **round_trip(model)}


@pytest.mark.distributed
def test_a_rank_holds_its_share_and_states_are_full() -> None:
    for rank, result in enumerate(run_ranks(memory_and_round_trip, 3)):
        memory = result["memory"]
        assert memory["parameters"] <= memory["bound"]
        assert memory["gradients"] == memory["parameters"]
        assert memory["alive"] == [0, 0]
        assert list(memory["own"].values()) == [[[2, 2, 1][rank], 32, 16]]
        assert result["same"] and result["loaded"] and result["assigned"] and result["tied"] and result["outputs"]
        assert result["error"] < 1e-5
        dense, experts = result["messages"]
        assert "q_proj.weight: the checkpoint has [11, 32], the model [32, 32]" in dense
        assert "model.layers.0.mlp.experts.down_proj" in experts
        assert all("size mismatch for" in said and "Missing" not in said for said in (dense, experts))
        assert "[2, 32, 16]" in experts and "[5, 32, 16]" in experts
        assert result["kept"]
        assert result["part"] == [VOCABULARY, 32]


def meta_device() -> dict[str, Any]:
    """A model that never existed as a whole: ranks other than 0 never allocate a whole dense parameter, and rank 0
    one module's at a time."""
    from transformers import AutoModelForCausalLM

    from hecate.wrap import shard_model

    allocated: list[int] = []
    original = shard_model._unwritten
    embedding = {torch.Size((VOCABULARY, 32))}

    def unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
        allocated.append(alive(embedding) if isinstance(like, nn.Parameter) else 0)
        return original(like, device)

    config = transformers_config("qwen3_moe", num_hidden_layers=1, tie_word_embeddings=True)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            made: nn.Module = AutoModelForCausalLM.from_config(config)
        return made

    shard_model._unwritten = unwritten
    model = on_meta()
    gc.collect()
    # The meta tensors themselves have these shapes too.
    before = alive(embedding)
    compiled_on_free_links(model, dense="shard")
    shard_model._unwritten = original
    reference = AutoModelForCausalLM.from_config(config)
    buffers = dict(model.named_buffers())
    same_buffers = all(torch.equal(buffers[name], b) for name, b in reference.named_buffers())
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    reference.load_state_dict(model.state_dict())
    worst = step_and_compare(model, reference, batch(0)).gradient
    tied = model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
    shared = on_meta()
    # A module that comes before the experts has a parameter of theirs, too.
    shared.model.embed_tokens.alias = shared.model.layers[0].mlp.experts.down_proj
    compiled_on_free_links(shared, dense="shard")
    alias = shard_of(shared.model.embed_tokens._parameters["alias"])
    replicated = compiled_on_free_links(on_meta())
    return {
        "alias": alias is not None and (alias.part, list(alias.full_shape)),
        "worst": worst,
        "finite": finite and all(bool(p.isfinite().all()) for p in replicated.parameters()),
        "same_buffers": same_buffers,
        "stds": {n: float(p.std()) for n, p in reference.named_parameters() if "_proj" in n},
        "tied": tied,
        "whole": sum(shard_of(p) is None for p in model.parameters()),
        "before": before,
        "allocations": len(allocated),
        "most": max(allocated[1:], default=0),
        "replicated": [float(p.double().square().sum()) for p in replicated.parameters() if shard_of(p) is None],
    }


@pytest.mark.distributed
def test_meta_device_model() -> None:
    ranks = run_ranks(meta_device, 2)
    for rank, result in enumerate(ranks):
        assert result["worst"] < 1e-5
        assert result["finite"] and result["same_buffers"]
        for name, std in result["stds"].items():
            assert std == pytest.approx(0.02, rel=0.1 if "experts" in name else 0.2), name
        assert result["tied"]
        assert result["whole"] == 0
        assert result["alias"] == ["experts", [8, 32, 16]]
        # After the embedding, which is first, nothing of its shape is left.
        assert result["before"] == 1 and result["most"] == 0
        assert rank == 0 or result["allocations"] < ranks[0]["allocations"]
        assert result["replicated"] == ranks[0]["replicated"] != [], "rank 0's values are everybody's"
