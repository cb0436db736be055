from __future__ import annotations

import pytest
import torch

from hecate.passes.captured.normalize_matmuls import normalize_matmuls
from tests.support.graphs import E, GraphUnderTest, H, I, R, apply, targets


def _with_transformers_operator() -> None:
    # It defines the operator; transformers is not needed otherwise.
    pytest.importorskip("transformers.integrations.moe")


def test_transformers_fallback() -> None:
    _with_transformers_operator()
    g = GraphUnderTest()
    rows, _, offsets = g.routing()
    weight = g.method("transpose", g.experts(I, H), -2, -1)
    gm = g.finish(g.call(torch.ops.transformers.grouped_mm_fallback, rows, weight, offs=offsets))
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
    outcome = normalize_matmuls(gm, _context())
    assert outcome.rewritten == 1
    assert targets(gm)[-1] == "grouped_mm.default"


def test_leaves_other_weights_and_other_forms_alone() -> None:
    _with_transformers_operator()
    g = GraphUnderTest()
    rows, _, offsets = g.routing()
    plain = g.input(torch.randn(E, H, I))
    gm = g.finish(g.call(torch.ops.transformers.grouped_mm_fallback, rows, plain, offs=offsets))
    assert apply(normalize_matmuls, g, gm).rewritten == 0

    g = GraphUnderTest()
    rows, _, _ = g.routing()
    batched = g.method("bfloat16", g.method("expand", g.method("unsqueeze", rows, 0), E, R, H))
    gm = g.finish(g.call(torch._grouped_mm, batched, g.method("bfloat16", g.experts(H, 8))))
    outcome = normalize_matmuls(gm, _context())
    assert outcome.rewritten == 0
    assert "no offs" in outcome.skipped[0].reason


def _context() -> object:
    from hecate.passes import PassContext

    return PassContext(world_size=1)
