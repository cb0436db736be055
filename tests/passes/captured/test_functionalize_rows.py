from __future__ import annotations

import operator

import torch

from hecate.passes.captured.flatten_batches import flatten_batches
from hecate.passes.captured.functionalize_rows import functionalize_rows
from tests.support.graphs import E, GraphUnderTest, H, I, R, apply, leaves_alone, targets


def _product(g: GraphUnderTest) -> tuple[torch.fx.Node, torch.fx.Node]:
    rows, ids, offsets = g.routing()
    out = g.call(torch.ops.hecate.grouped_mm.default, rows, g.experts(H, I), offsets)
    return out, g.call(operator.getitem, g.experts(I), ids)


def test_add_in_place_becomes_plain(g: GraphUnderTest) -> None:
    out, bias = _product(g)
    g.method("add_", out, bias)
    g.method("mul_", out, 2.0)
    gm = g.finish(g.call(torch.nn.functional.silu, out))
    assert apply(functionalize_rows, g, gm).rewritten == 2
    assert "add_" not in targets(gm) and "add" in targets(gm)


def test_keeps_the_dtype_of_the_target(g: GraphUnderTest) -> None:
    rows, ids, offsets = g.routing()
    rows, weight = g.method("bfloat16", rows), g.method("bfloat16", g.experts(H, I))
    out = g.call(torch.ops.hecate.grouped_mm.default, rows, weight, offsets)
    g.method("add_", out, g.call(operator.getitem, g.experts(I), ids))
    gm = g.finish(out)
    assert apply(functionalize_rows, g, gm).rewritten == 1
    assert gm(*g.inputs)[0].dtype == torch.bfloat16


def test_batched_products_and_sums_with_biases(g: GraphUnderTest) -> None:
    rows = g.call(torch.bmm, g.input(torch.randn(E, R, H)), g.experts(H, I))
    g.call(operator.iadd, rows, g.experts(1, I))
    total = g.call(operator.add, rows, g.experts(1, I))
    g.method("mul_", total, 2.0)
    gm = g.finish(g.call(torch.nn.functional.silu, total))
    assert apply(functionalize_rows, g, gm).rewritten == 2
    assert apply(flatten_batches, g, gm).rewritten == 1


def test_leaves_alone_views_of_parameters(g: GraphUnderTest) -> None:
    weight = g.method("clone", g.experts(H, I))
    g.method("mul_", weight, 2.0)
    leaves_alone(functionalize_rows, g, g.finish(g.call(torch.bmm, g.input(torch.randn(E, R, H)), weight)))


def test_leaves_alone_what_was_read_before(g: GraphUnderTest) -> None:
    out, bias = _product(g)
    view = g.method("view", out, -1)
    g.method("add_", out, bias)
    outcome = leaves_alone(functionalize_rows, g, g.finish(view))
    assert "read it before" in outcome.skipped[0].reason


def test_leaves_alone_what_happens_without_gradients(g: GraphUnderTest) -> None:
    out, _ = _product(g)
    g.call(torch._C._set_grad_enabled, False)
    g.method("mul_", out, 2.0)
    g.call(torch._C._set_grad_enabled, True)
    leaves_alone(functionalize_rows, g, g.finish(out))


def test_leaves_other_tensors_alone(g: GraphUnderTest) -> None:
    copy = g.method("clone", g.input(torch.randn(3)))
    g.method("add_", copy, 1.0)
    leaves_alone(functionalize_rows, g, g.finish(copy))
