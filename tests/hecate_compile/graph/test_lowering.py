"""What is done to graphs that run node by node (``backend="aot_eager"``)."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hecate.graph.lowering import _simplify_views

aten = torch.ops.aten


def test_views_that_change_nothing_are_no_calls() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        same = aten.view.default(x, [2, 3])
        return aten.view.default(same.sin(), [6]), aten.view.default(same, [2, 3])

    x = torch.randn(2, 3)
    gm = make_fx(function, tracing_mode="fake")(x)
    before = gm(x)
    _simplify_views(gm)
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [aten.sin.default, aten.reshape.default, aten.reshape.default]
    after = gm(x)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert after[1] is not x, "a result is a view of its own"
    # As where a gradient arrives with other strides than were traced: aten.view would refuse.
    torch.testing.assert_close(gm(x.t().contiguous().t()), before, rtol=0, atol=0)


def test_views_of_sizes_that_vary_stay() -> None:
    gm = make_fx(lambda x: aten.view.default(x, x.shape).sin(), tracing_mode="symbolic")(torch.randn(2, 3))
    _simplify_views(gm)
    assert sum(node.target is aten.reshape.default for node in gm.graph.nodes) == 1
    torch.testing.assert_close(gm(torch.ones(4, 5)), torch.ones(4, 5).sin())
