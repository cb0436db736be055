"""Whether all rows are in front of the last offset, as far as a graph says."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from hecate.passes import PassContext
from hecate.passes.analysis.expert_numbers import count_all
from hecate.passes.captured.normalize_matmuls import normalize_matmuls
from hecate.passes.fx import calls
from tests.support.graphs import E, GraphUnderTest, H

TOKENS, CHOICES = 8, 2
Count = Callable[[GraphUnderTest, Node], Node]


def histogram(g: GraphUnderTest, ids: Node, **options: int) -> Node:
    return g.call(torch.histc, g.method("float", ids), **({"bins": E, "min": 0, "max": E - 1} | options))


def one_hot(g: GraphUnderTest, ids: Node) -> Node:
    return g.method("sum", g.call(torch.nn.functional.one_hot, ids, E), 0)


def experts(g: GraphUnderTest, count: Count, *, among: int = E, rows: int = TOKENS * CHOICES) -> tuple[Node, Node]:
    """Rows, and where those of each expert end."""
    hidden = g.input(torch.randn(TOKENS, H))
    logits = g.call(torch.nn.functional.linear, hidden, g.parameter(among, H))
    chosen = g.call(operator.getitem, g.call(torch.topk, logits, CHOICES, dim=-1), 1)
    ids = g.call(operator.getitem, g.call(torch.sort, g.method("reshape", chosen, -1)), 0)
    return g.input(torch.randn(rows, H)), g.call(torch.cumsum, count(g, ids), dim=0, dtype=torch.int32)


@pytest.mark.parametrize(
    "count",
    [
        histogram,
        lambda g, ids: histogram(g, ids, max=E),
        lambda g, ids: g.call(torch.bincount, ids, minlength=E),
        one_hot,
    ],
)
def test_every_row_has_an_expert(count: Count, g: GraphUnderTest) -> None:
    rows, offsets = experts(g, count)
    g.finish(offsets)
    assert count_all(offsets, rows)


def zeroed(g: GraphUnderTest, ids: Node) -> Node:
    counts = histogram(g, ids)
    g.call(operator.setitem, counts, 0, 0)
    return counts


UNKNOWN: dict[str, tuple[Count, dict[str, int]]] = {
    "experts of other ranks": (histogram, {"among": E + 1}),
    "fewer numbers are counted": (lambda g, ids: histogram(g, ids, max=E - 2), {}),
    "the histogram has the range of its data": (lambda g, ids: histogram(g, ids, max=0), {}),
    "counts that change": (zeroed, {}),
    "other rows": (histogram, {"rows": TOKENS * CHOICES + 1}),
    "counts from elsewhere": (lambda g, ids: g.input(torch.ones(E)), {}),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_that_is_not_known(case: str) -> None:
    count, options = UNKNOWN[case]
    g = GraphUnderTest()
    rows, offsets = experts(g, count, **options)
    g.finish(offsets)
    assert not count_all(offsets, rows)


@pytest.mark.parametrize("among", [E, E + 1])
def test_a_product_says_so(among: int, g: GraphUnderTest) -> None:
    rows, offsets = experts(g, histogram, among=among)
    # Sizes of multiples of 16 bytes, as this spelling wants them.
    operands = [g.method("bfloat16", one) for one in (rows, g.experts(H, 8))]
    gm = g.finish(g.call(torch._grouped_mm, *operands, offs=offsets))
    # Its numbers are not looked at: torch leaves rows without an expert unwritten.
    assert normalize_matmuls(gm, PassContext(world_size=1)).rewritten == 1
    (product,) = (node for node in gm.graph.nodes if calls(node, torch.ops.hecate.grouped_mm))
    assert product.args[3:] == ((True,) if among == E else ())
