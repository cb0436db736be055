"""``Config(mixed_precision=)``: computation and gradients in the types that are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import hecate
from hecate.compiled_model import compiled_model_of
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import compare, compiled_on_free_links, dense_gathers, run_step
from tests.support.ranks import run_ranks

# A family of each kind of experts, and each way dense parameters are kept.
CASES = [("gpt_oss", "replicate"), ("plain", "shard")]
if ALL:
    CASES += [("qwen3_moe", "replicate"), ("plain", "replicate"), ("qwen3_moe", "shard")]


def mixed_precision(expert_group: int | None = None) -> dict[str, Any]:
    """bf16 compute on fp32 parameters, against one process whose parameters are cast to bf16."""
    found = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for family, dense in CASES:
        reference = build(family, layers=1)
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16()
        model = compiled_on_free_links(
            build(family, layers=1), mixed_precision=policy, dense=dense, expert_group=expert_group
        )
        with dense_gathers() as gathered:
            loss = run_step(model, batch(0))
        expected = reference(input_ids=batch(0), labels=batch(0))["loss"]
        expected.backward()
        difference = compare(model, loss, reference, expected.detach().float())
        found[f"{family} {dense}"] = {
            "loss": difference.loss,
            "gradient": difference.gradient,
            "worst": difference.worst,
            "dtypes": sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}),
            "out": str(loss.dtype),
            "travelled": sorted(set(map(str, gathered))),
        }
    return found


@pytest.mark.distributed
def test_mixed_precision() -> None:
    for result in run_ranks(mixed_precision, 2):
        for case, errors in result.items():
            assert errors["loss"] < 2**-7, (case, "a unit in the last place of bf16")
            assert errors["gradient"] < 5e-2, (case, errors["worst"])
            assert errors["dtypes"] == ["torch.float32"]
            assert errors["out"] == "torch.float32"
            assert errors["travelled"] == (["torch.bfloat16"] if case.endswith("shard") else [])


def test_mixed_precision_computes_in_bf16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = hecate.compile(build("mixtral", layers=1), hecate.Config(backend="aot_eager", mixed_precision=policy))
    out = model(input_ids=batch(0), labels=batch(0))
    assert out["logits"].dtype == torch.bfloat16
    out["loss"].backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_what_dense_gradients_are_averaged_in_is_what_usage_says() -> None:
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
