from __future__ import annotations

from typing import Any

import pytest
import torch

import hecate
from hecate.passes import PassContext
from hecate.passes.captured.normalize_matmuls import normalize_matmuls
from tests.support.graphs import E, GraphUnderTest, H, I, R, apply, leaves_alone, targets
from tests.support.models import batch, build

CONTEXT = PassContext(world_size=1)


@pytest.fixture
def fallback() -> Any:
    """An operator that transformers defines, which is not needed otherwise."""
    pytest.importorskip("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback


def test_transformers_fallback(fallback: Any, g: GraphUnderTest) -> None:
    rows, _, offsets = g.routing()
    weight = g.method("transpose", g.experts(I, H), -2, -1)
    gm = g.finish(g.call(fallback, rows, weight, offs=offsets))
    assert apply(normalize_matmuls, g, gm).rewritten == 1
    assert targets(gm)[-1] == "grouped_mm.default"


@pytest.mark.parametrize("spelling", ["_grouped_mm", "nn.functional.grouped_mm"])
def test_torch_spellings(spelling: str) -> None:
    target = torch._grouped_mm if spelling == "_grouped_mm" else getattr(torch.nn.functional, "grouped_mm", None)
    if target is None:
        # Public only in newer torch; where it is missing no model can spell it so. torch 2.13 runs this.
        pytest.skip("this torch has no torch.nn.functional.grouped_mm")
    g = GraphUnderTest()
    rows, _, offsets = g.routing()
    rows, weight = g.method("bfloat16", rows), g.method("bfloat16", g.experts(H, 8))
    gm = g.finish(g.call(target, rows, weight, offs=offsets))
    assert normalize_matmuls(gm, CONTEXT).rewritten == 1
    assert targets(gm)[-1] == "grouped_mm.default"


def test_leaves_other_weights_and_other_forms_alone(fallback: Any, g: GraphUnderTest) -> None:
    rows, _, offsets = g.routing()
    plain = g.input(torch.randn(E, H, I))
    gm = g.finish(g.call(fallback, rows, plain, offs=offsets))
    leaves_alone(normalize_matmuls, g, gm)

    g = GraphUnderTest()
    rows, _, _ = g.routing()
    batched = g.method("bfloat16", g.method("expand", g.method("unsqueeze", rows, 0), E, R, H))
    gm = g.finish(g.call(torch._grouped_mm, batched, g.method("bfloat16", g.experts(H, 8))))
    outcome = normalize_matmuls(gm, CONTEXT)
    assert outcome.rewritten == 0
    assert "no offs" in outcome.skipped[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_float32_under_autocast_is_told_once_and_computed(
    autocast: bool, dtype: torch.dtype, fallback: Any, g: GraphUnderTest
) -> None:
    """Autocast has no rule for it, so operands stay as they are, here and in the model."""
    rows, _, offsets = g.routing()
    rows, weights = g.method("to", rows, dtype), [g.method("to", g.experts(H, H), dtype) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for weight in weights:
            rows = g.call(fallback, rows, weight, offs=offsets)
        gm = g.finish(rows)
        (expected,) = gm(*g.inputs)
        outcome = normalize_matmuls(gm, PassContext(world_size=1, layer_names={g.layer: "experts"}))
        gm.recompile()
        (found,) = gm(*g.inputs)
    assert outcome.rewritten == 2 and targets(gm).count("grouped_mm.default") == 2
    told = ["experts"] if autocast and dtype == torch.float32 else []
    assert [skip.where for skip in outcome.skipped] == told
    assert not any(skip.fallback for skip in outcome.skipped)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_inside_of_the_model(enabled: bool, fallback: Any, g: GraphUnderTest) -> None:
    """It may also be there to be switched off, as around a gate."""
    rows, _, offsets = g.routing()
    mode = g.call(torch.amp.autocast_mode._enter_autocast, "cpu", torch.bfloat16, enabled, None)
    out = g.call(fallback, rows, g.experts(H, I), offs=offsets)
    g.call(torch.amp.autocast_mode._exit_autocast, mode)
    outcome = normalize_matmuls(g.finish(out), CONTEXT)
    assert (outcome.rewritten, len(outcome.skipped)) == (1, int(enabled))


def test_explain_says_that_experts_are_not_cast() -> None:
    reference, model = (build("qwen3_moe", layers=1) for _ in range(2))
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch(0)).logits
        expected = reference(input_ids=batch(0)).logits
    assert logits.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(logits, expected, rtol=5e-2, atol=5e-2)
    explanation = hecate.explain(model)
    assert all(region.rewritten for region in explanation.regions)
    skips = [skip for skip in explanation.skipped if "autocast" in skip.reason]
    assert [skip.where for skip in skips] == ["model.layers.0.mlp.experts"]
    text = str(explanation)
    assert "experts compute in float32" in text and "Config(mixed_precision=...) in place of autocast" in text
