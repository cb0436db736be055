from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes.captured.accumulate_rows import accumulate_rows
from hecate.passes.captured.group_expert_loops import group_expert_loops
from tests.support.graphs import E, GraphUnderTest, H, R, apply, leaves_alone, targets


def masked_loop(
    g: GraphUnderTest,
    *,
    add: Any = operator.iadd,
    rows: str = "masks",
    swapped: bool = False,
    kept: bool = False,
    of_experts: bool = True,
) -> GraphModule:
    """``out[rows] += hidden[rows] @ w[e]`` with masks, numbers that come once, or numbers that come twice."""
    hidden, weights = g.input(torch.randn(R, H)), g.experts(H, H)
    out = g.call(torch.zeros_like, hidden)
    chosen = g.call(operator.getitem, g.call(torch.topk, g.input(torch.randn(R, E)), 2), 1)
    outputs: list[Node] = []
    for expert in range(E):
        if rows == "numbers":
            index = g.call(operator.getitem, g.call(torch.where, g.call(operator.eq, chosen, expert)), 0)
        else:
            index = g.input(torch.arange(R) % E == expert if rows == "masks" else torch.tensor([expert, expert]))
        # The fake values know no number of rows that depends on data, so torch asks for it as Dynamo lets it.
        read = g.call(operator.getitem, out, index)
        if rows != "twice":
            g.call(torch.ops.aten.sym_size.int, read, 0)
        weight = g.call(operator.getitem, weights, expert) if of_experts else g.input(torch.randn(H, H))
        y = g.call(operator.matmul, g.call(operator.getitem, hidden, index), weight)
        total = g.call(add, y, read) if swapped else g.call(add, read, y)
        g.call(operator.setitem, out, index, total)
        outputs += [total] if kept else []
    return g.finish(out, *outputs)


@pytest.fixture(autouse=True)
def data_dependent_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Dynamic(FakeTensorMode):
        def __init__(self, **options: Any) -> None:
            super().__init__(shape_env=ShapeEnv())

    monkeypatch.setattr("tests.support.graphs.FakeTensorMode", Dynamic)


@pytest.mark.parametrize(
    "options", [{}, {"add": operator.add}, {"add": operator.add, "swapped": True}, {"rows": "numbers"}]
)
def test_rewrites_additions_to_rows(options: dict[str, Any], g: GraphUnderTest) -> None:
    gm = masked_loop(g, **options)
    assert apply(accumulate_rows, g, gm).rewritten == E
    names = targets(gm)
    assert names.count("index_put_") == E and "setitem" not in names
    # Which is what the loop was in the way of.
    assert apply(group_expert_loops, g, gm).rewritten == 1


@pytest.mark.parametrize(
    "options", [{"rows": "twice"}, {"add": operator.isub}, {"kept": True}, {"of_experts": False}]
)
def test_leaves_alone(options: dict[str, Any], g: GraphUnderTest) -> None:
    leaves_alone(accumulate_rows, g, masked_loop(g, **options))
