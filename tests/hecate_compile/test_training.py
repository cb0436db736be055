"""Many steps: changing routing, extreme routing, optimizers, accumulation, clipping, state dicts."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from hecate.compiled_model import compiled_model_of
from hecate.runtime.placement.planner import Rates
from hecate.wrap.shard import shard_of
from tests.support.models import batch, build
from tests.support.parity import clear_gradients, compare, error_of, rank_and_size, run_step, step_and_compare
from tests.support.ranks import run_ranks

# Links so fast, beside slow matmuls, that every step has replicas.
FREE_LINKS = Rates(flops=1e9, rank_bytes=1e12, node_bytes=1e12)
_HERE = "tests.hecate_compile.test_training"


def _compiled(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    import hecate

    return hecate.compile(model, hecate.Config(**({"backend": "aot_eager", "rates": FREE_LINKS} | options)))


def _count_in_dump(folder: str, text: str) -> int:
    """In the graph as captured, which rank 0 writes."""
    dist.barrier()
    return Path(folder, "rank0", "graph0", "00_model.py").read_text().count(text)


def fifty_steps() -> dict[str, Any]:
    """Top-1 routing; in some steps every token goes to one expert, so most ranks get no row."""
    import hecate

    reference = build("gpt_oss", num_experts_per_tok=1)
    model = _compiled(build("gpt_oss", num_experts_per_tok=1), policy="static")
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
    for result in run_ranks(f"{_HERE}:fifty_steps", 2):
        assert result["worst"] < 1e-5
        assert result["zero_gradients"]
        assert result["counted"]
        assert result["idle_ranks"] == 40 * 2
        assert result["graphs"] == 1


def more_ranks_than_experts() -> dict[str, Any]:
    """With replicas, by default."""
    import hecate

    reference = build("qwen3_moe", layers=1, num_experts=3)
    model = _compiled(build("qwen3_moe", layers=1, num_experts=3))
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
    for result in run_ranks(f"{_HERE}:more_ranks_than_experts", 4):
        # Adam divides by the root of tiny second moments, which magnifies rounding from the second step on.
        assert result["worst"] < 1e-3
        assert result["state"] == result["parameters"]
        assert result["replicas"] > 0 and result["slots"] == 1


def accumulate_and_clip() -> dict[str, Any]:
    """Two local micro-batches, then a synchronized one; the sum is clipped; momentum SGD for three rounds."""
    import hecate

    reference = build("mixtral")
    model = _compiled(build("mixtral"))
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
    for result in run_ranks(f"{_HERE}:accumulate_and_clip", 2):
        assert result["worst"] < 1e-5
        assert result["norm"] < 1e-5


def state_dict_round_trip() -> dict[str, Any]:
    """Full tensors out, full tensors in, wrong shapes refused, uneven ownership."""
    reference = build("qwen3_moe", num_experts=5)
    model = _compiled(build("qwen3_moe", num_experts=5))
    state, expected = model.state_dict(), reference.state_dict()
    same = list(state) == list(expected) and all(torch.equal(state[k], expected[k]) for k in expected)

    other = build("qwen3_moe", seed=1, num_experts=5).state_dict()
    model.load_state_dict(other)
    loaded = all(torch.equal(value, other[key]) for key, value in model.state_dict().items())
    model.load_state_dict(expected, assign=True)
    assigned = all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())

    wrong = dict(expected)
    key = "model.layers.0.mlp.experts.down_proj"
    wrong[key] = wrong[key][:2]
    try:
        model.load_state_dict(wrong)
        message = ""
    except RuntimeError as error:
        message = str(error)
    ids = batch(0)
    loss = run_step(model, ids)
    reference_loss = reference(input_ids=ids, labels=ids)["loss"]
    reference_loss.backward()
    error = compare(model, loss, reference, reference_loss.detach()).gradient
    shapes = [list(p.shape) for n, p in model.named_parameters() if n == key]
    return {
        "same": same,
        "loaded": loaded,
        "assigned": assigned,
        "message": message,
        "error": error,
        "shapes": shapes,
    }


@pytest.mark.distributed
def test_state_dict_is_full_and_loads_back() -> None:
    ranks = run_ranks(f"{_HERE}:state_dict_round_trip", 2)
    for rank, result in enumerate(ranks):
        assert result["same"] and result["loaded"] and result["assigned"]
        assert "model.layers.0.mlp.experts.down_proj" in result["message"]
        assert "[2, 32, 16]" in result["message"] and "[5, 32, 16]" in result["message"]
        assert result["error"] < 1e-5
        assert result["shapes"] == [[3 - rank, 32, 16]]


def ranks_with_other_weights_and_lengths() -> dict[str, Any]:
    """Rank 0's weights win, and each rank may have sequences of its own length."""
    rank, size = rank_and_size()
    reference = build("olmoe", seed=0, layers=1)
    model = _compiled(build("olmoe", seed=rank, layers=1))
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
    for result in run_ranks(f"{_HERE}:ranks_with_other_weights_and_lengths", 3):
        assert result["worst"] < 1e-5


def meta_device() -> dict[str, Any]:
    """A model that never existed as a whole; rank 0 initializes one module at a time."""
    from transformers import AutoModelForCausalLM

    import hecate
    from tests.support.models import transformers_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config("qwen3_moe"))
    model = _compiled(model)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    buffers = dict(model.named_buffers())
    reference = AutoModelForCausalLM.from_config(transformers_config("qwen3_moe"))
    same_buffers = all(torch.equal(buffers[name], b) for name, b in reference.named_buffers())
    reference.load_state_dict(model.state_dict())
    ids = batch(0)
    loss = run_step(model, ids)
    expected = reference(input_ids=ids, labels=ids)["loss"]
    expected.backward()
    difference = compare(model, loss, reference, expected.detach())
    stds = {n.rpartition(".")[2]: float(p.std()) for n, p in model.named_parameters() if "experts" in n}
    del hecate
    return {"finite": finite, "same_buffers": same_buffers, "worst": difference.gradient, "stds": stds}


@pytest.mark.distributed
def test_meta_device_model() -> None:
    for result in run_ranks(f"{_HERE}:meta_device", 2):
        assert result["finite"] and result["same_buffers"]
        assert result["worst"] < 1e-5
        for std in result["stds"].values():
            assert std == pytest.approx(0.02, rel=0.1)


def no_full_copy() -> dict[str, Any]:
    """What expert memory is alive after compile, and after a step."""
    model = build("qwen3_moe")
    shapes = {p.shape for name, p in model.named_parameters() if "experts" in name}
    model = _compiled(model)
    alive = [_alive(shapes)]
    run_step(model, batch(0))
    alive.append(_alive(shapes))
    own = {n: list(p.shape) for n, p in model.named_parameters() if n.endswith("0.mlp.experts.down_proj")}
    return {"alive": alive, "own": own}


def _alive(shapes: set[torch.Size]) -> int:
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return sum(not isinstance(t, FakeTensor) and t.shape in shapes for t in tensors)


@pytest.mark.distributed
def test_a_rank_holds_its_shard_and_no_full_copy() -> None:
    for result in run_ranks(f"{_HERE}:no_full_copy", 2):
        assert result["alive"] == [0, 0]
        assert list(result["own"].values()) == [[4, 32, 16]]


def mixed_precision() -> dict[str, Any]:
    """bf16 compute on fp32 parameters, against one process whose parameters are cast to bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    found = {}
    for family in ("qwen3_moe", "gpt_oss", "plain"):
        reference = build(family, layers=1)
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16()
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        model = _compiled(build(family, layers=1), mixed_precision=policy)
        ids = batch(0)
        loss = run_step(model, ids)
        expected = reference(input_ids=ids, labels=ids)["loss"]
        expected.backward()
        difference = compare(model, loss, reference, expected.detach().float())
        dtypes = sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
        found[family] = {
            "loss": difference.loss,
            "gradient": difference.gradient,
            "dtypes": dtypes,
            "out": str(loss.dtype),
        }
    return found


@pytest.mark.distributed
def test_mixed_precision() -> None:
    for result in run_ranks(f"{_HERE}:mixed_precision", 2):
        for family, errors in result.items():
            assert errors["loss"] < 2**-7, (family, "a unit in the last place of bf16")
            assert errors["gradient"] < 5e-2, family
            assert errors["dtypes"] == ["torch.float32"]
            assert errors["out"] == "torch.float32"


def test_mixed_precision_computes_in_bf16() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import hecate

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = hecate.compile(build("mixtral"), hecate.Config(backend="aot_eager", mixed_precision=policy))
    out = model(input_ids=batch(0), labels=batch(0))
    assert out["logits"].dtype == torch.bfloat16
    out["loss"].backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_what_dense_gradients_are_averaged_in_is_what_usage_says() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import hecate
    from hecate.compiled_model import compiled_model_of

    bf16, fp32 = torch.bfloat16, torch.float32
    cases: list[tuple[dict[str, Any], torch.dtype]] = [
        ({}, fp32),
        ({"mixed_precision": MixedPrecisionPolicy(param_dtype=bf16)}, bf16),
        ({"mixed_precision": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)}, fp32),
        ({"mixed_precision": MixedPrecisionPolicy(reduce_dtype=bf16)}, bf16),
        ({"wire_dtype": bf16}, bf16),
    ]
    for options, travels in cases:
        model = hecate.compile(build("plain", layers=1).bfloat16(), hecate.Config(backend="aot_eager", **options))
        assert compiled_model_of(model, "a test").sync.travels_as(bf16) == travels, options


def gradient_checkpointing(folder: str) -> dict[str, Any]:
    import hecate

    reference = build("qwen3_moe")
    model = build("qwen3_moe")
    model.gradient_checkpointing_enable()
    model.train()
    reference.train()
    model = _compiled(model, dump=folder)
    worst = 0.0
    for step in range(3):
        ids = batch(step)
        worst = max(worst, step_and_compare(model, reference, ids).gradient)
    explanation = hecate.explain(model)
    return {
        "worst": worst,
        "checkpoints": _count_in_dump(folder, "tag_activation_checkpoint"),
        "graphs": len(explanation.graphs),
        "exchanged": sum(r.rewritten for r in explanation.graphs[0].passes if r.name == "exchange_rows"),
    }


@pytest.mark.distributed
def test_gradient_checkpointing(tmp_path: Path) -> None:
    for result in run_ranks(f"{_HERE}:gradient_checkpointing", 2, folder=str(tmp_path)):
        assert result["worst"] < 1e-5
        assert result["graphs"] == 1
        assert result["exchanged"] == 2
        assert result["checkpoints"] >= 2


def generate() -> dict[str, Any]:
    """transformers' own generation: a prompt, then one token at a time with a cache that grows."""
    import hecate

    reference, model = build("qwen3_moe").eval(), _compiled(build("qwen3_moe")).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    prompt = batch(0, rows=2)
    same = torch.equal(model.generate(prompt, **options), reference.generate(prompt, **options))
    return {"same": same, "graphs": len(hecate.explain(model).graphs)}


@pytest.mark.distributed
def test_generate() -> None:
    for result in run_ranks(f"{_HERE}:generate", 2):
        assert result["same"]
        assert result["graphs"] <= 3, "prompt, first token, and one for every later length"


def evaluate_between_steps() -> dict[str, Any]:
    """No-grad forwards and a new sequence length between training steps."""
    reference, model = build("qwen3_moe", layers=1), _compiled(build("qwen3_moe", layers=1))
    worst = 0.0
    for step, length in enumerate((16, 16, 9, 12)):
        ids = batch(step, length=length)
        model.eval()
        with torch.no_grad():
            rank, size = rank_and_size()
            logits = model(input_ids=ids.chunk(size)[rank])["logits"]
            expected = reference(input_ids=ids.chunk(size)[rank])["logits"]
            worst = max(worst, error_of(logits, expected, relative=True))
        model.train()
        worst = max(worst, step_and_compare(model, reference, ids).gradient)
    if dist.is_initialized():
        dist.barrier()
    return {"worst": worst}


@pytest.mark.distributed
def test_evaluation_and_other_lengths_between_steps() -> None:
    for result in run_ranks(f"{_HERE}:evaluate_between_steps", 2):
        assert result["worst"] < 1e-5
