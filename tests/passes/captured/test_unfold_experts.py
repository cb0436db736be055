"""Experts one under the other are read expert by expert, in every spelling."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes.captured.unfold_experts import unfold_experts
from tests.support.graphs import E, GraphUnderTest, H, I, apply, leaves_alone, targets

Spelling = Callable[[GraphUnderTest, Node], list[Node]]


def of_all(g: GraphUnderTest, folded: Node) -> list[Node]:
    return [g.call(operator.getitem, g.method("view", folded, -1, I, H), expert) for expert in range(E)]


def by_chunk(g: GraphUnderTest, folded: Node) -> list[Node]:
    return g.parts(g.call(torch.chunk, folded, E, dim=0), E)


def by_split(g: GraphUnderTest, folded: Node) -> list[Node]:
    return g.parts(g.method("split", folded, I), E)


def by_unbind(g: GraphUnderTest, folded: Node) -> list[Node]:
    return g.parts(g.method("unbind", g.method("unflatten", folded, 0, (E, I))), E)


def by_chunk_of_all(g: GraphUnderTest, folded: Node) -> list[Node]:
    pieces = g.parts(g.method("chunk", g.method("reshape", folded, E, I, H), E), E)
    return [g.method("squeeze", piece, dim=0) for piece in pieces]


def by_last_rows(g: GraphUnderTest, folded: Node) -> list[Node]:
    return [g.call(operator.getitem, folded, slice((e - E) * I, (e - E + 1) * I or None)) for e in range(E)]


def by_rows(g: GraphUnderTest, folded: Node) -> list[Node]:
    ends = [*(I * number for number in range(1, E)), None]
    return [g.call(operator.getitem, folded, slice(e * I, end)) for e, end in enumerate(ends)]


def graph_of(g: GraphUnderTest, spelling: Spelling) -> GraphModule:
    folded = g.method("view", g.experts(I, H), -1, H)
    scaled = [g.call(operator.mul, one, number + 1.0) for number, one in enumerate(spelling(g, folded))]
    return g.finish(g.call(torch.cat, scaled))


@pytest.mark.parametrize("spelling", [of_all, by_chunk, by_split, by_unbind, by_chunk_of_all, by_rows, by_last_rows])
def test_one_expert_is_read(spelling: Spelling, g: GraphUnderTest) -> None:
    gm = graph_of(g, spelling)
    assert apply(unfold_experts, g, gm).rewritten
    reads = {node for node in gm.graph.nodes if node.target is operator.getitem}
    assert all(node.args[0].target is torch.ops.hecate.gather_experts for node in reads)
    assert sorted(targets(gm)) == sorted(["gather_experts", *["getitem", "mul"] * E, "cat"])


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param(lambda g, w: [w], id="whole"),
        pytest.param(
            lambda g, w: [g.call(operator.getitem, g.method("view", w, 1, -1, H), slice(0, 1))], id="one of one"
        ),
        pytest.param(lambda g, w: g.parts(g.method("split", w, 2 * I), 2), id="pairs"),
        pytest.param(lambda g, w: g.parts(g.method("chunk", w, 4, 1), 4), id="columns"),
        pytest.param(lambda g, w: [g.call(operator.getitem, w, slice(1, I + 1))], id="rows of two"),
        pytest.param(lambda g, w: [g.call(operator.getitem, w, 0)], id="one row"),
        pytest.param(lambda g, w: [g.call(operator.getitem, w, slice(0, 2 * I, 2))], id="every other row"),
        pytest.param(lambda g, w: [g.method("view", w, I, E, H)], id="other sizes"),
    ],
)
def test_other_uses_stay(spelling: Spelling, g: GraphUnderTest) -> None:
    leaves_alone(unfold_experts, g, graph_of(g, spelling))
