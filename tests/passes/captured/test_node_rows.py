from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.group_expert_loops import group_expert_loops
from hecate.passes.invariants import InvalidGraphError, verify
from hecate.runtime.placement.planner import Rates
from tests.support.graphs import E, GraphUnderTest, H, I, R, apply, targets

K = 2
T = R // K


class Layer:
    """A layer as transformers writes it, of which a test says what is different."""

    def __init__(self) -> None:
        self.g = g = GraphUnderTest()
        self.hidden = g.input(torch.randn(T, H))
        self.chosen = g.input(torch.randint(0, E, (R,)))
        self.weights = g.input(torch.rand(R))
        ordered = g.call(torch.sort, self.chosen)
        ids, self.order = (g.call(operator.getitem, ordered, index) for index in range(2))
        self.tokens = g.call(operator.floordiv, self.order, K)
        self.rows = g.call(operator.getitem, self.hidden, self.tokens)
        counts = g.call(torch.histc, g.method("float", ids), bins=E, min=0, max=E - 1)
        self.offsets = g.call(torch.cumsum, counts, dim=0, dtype=torch.int32)

    def experts(self, rows: Node | None = None) -> Node:
        g = self.g
        x = g.method("contiguous", self.rows) if rows is None else rows
        x = g.call(torch.ops.hecate.grouped_mm.default, x, g.experts(H, I), self.offsets)
        x = g.call(torch.nn.functional.silu, x)
        return g.call(torch.ops.hecate.grouped_mm.default, x, g.experts(I, H), self.offsets)

    def weighted(self, rows: Node) -> Node:
        g = self.g
        return g.call(
            operator.mul, rows, g.method("unsqueeze", g.call(operator.getitem, self.weights, self.order), -1)
        )

    def inverse(self, order: Node | None = None) -> Node:
        g, order = self.g, order if order is not None else self.order
        inverse = g.call(torch.empty_like, order)
        g.call(operator.setitem, inverse, order, g.call(torch.arange, R))
        return inverse

    def summed(self, rows: Node, inverse: Node | None = None, choices: int = K) -> Node:
        g = self.g
        rows = g.call(operator.getitem, rows, inverse if inverse is not None else self.inverse())
        return g.method("sum", g.method("view", rows, R // choices, choices, H), dim=1)


def dispatch(layer: Layer, gm: GraphModule, **known: Any) -> Any:
    known = {"world_size": 4, "nodes": 2, "ranks_per_node": 2, "dispatch": "nodes"} | known
    return apply(exchange_rows, layer.g, gm, **known)


def moves(gm: GraphModule) -> list[str]:
    names = [name.removesuffix(".default") for name in targets(gm)]
    return [name for name in names if name.startswith(("exchange", "route"))]


BY_NODE = ["route", "route_nodes", "exchange_nodes", "exchange_nodes_back"]

FORMS: dict[str, Callable[[Layer], Node]] = {
    "transformers": lambda a: a.summed(a.weighted(a.experts())),
    "without weights": lambda a: a.summed(a.experts()),
    "argsort": lambda a: a.summed(a.experts(), a.g.call(torch.argsort, a.order)),
    "casts": lambda a: a.summed(a.g.method("double", a.weighted(a.g.method("contiguous", a.experts())))),
    "index_add": lambda a: a.g.call(
        torch.index_add,
        a.g.call(torch.zeros_like, a.hidden),
        0,
        a.g.call(operator.floordiv, a.order, K),
        a.weighted(a.experts()),
    ),
    "index_add_": lambda a: a.g.method(
        "index_add_", a.g.call(torch.zeros_like, a.hidden), 0, a.tokens, a.weighted(a.experts())
    ),
    "index_select": lambda a: a.summed(a.experts(a.g.call(torch.index_select, a.hidden, 0, a.tokens))),
    "parts that are joined": lambda a: a.summed(a.weighted(_joined(a, a.experts()))),
}


def _joined(a: Layer, rows: Node) -> Node:
    parts = a.g.call(torch.split, rows, [4, R - 4])
    return a.g.call(torch.cat, [a.g.call(operator.getitem, parts, index) for index in range(2)])


@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rows_cross_once(form: str, replicates: bool) -> None:
    layer = Layer()
    gm = layer.g.finish(FORMS[form](layer))
    outcome = dispatch(layer, gm, replicates=replicates)
    assert (outcome.rewritten, outcome.skipped) == (1, ())
    # The weights travel each by itself.
    assert sorted(moves(gm)) == sorted(BY_NODE + ["exchange"] * ("mul" in targets(gm)))


def _and_read(a: Layer) -> Node:
    """Somebody reads single results too."""
    rows = a.experts()
    return a.g.call(operator.add, a.summed(rows), a.g.method("mean", rows))


def _in_turns(a: Layer, *, read: bool = False, other: bool = False) -> Node:
    """Two gathers, and two sums into one tensor."""
    g = a.g
    tokens = [g.call(operator.getitem, a.tokens, part) for part in (slice(None, 4), slice(4, None))]
    pieces = [g.call(operator.getitem, a.hidden, index) for index in tokens]
    sizes = [g.method("size", piece, 0) for piece in pieces]
    parts = g.call(torch.split, a.experts(g.call(torch.cat, pieces)), sizes)
    out = g.call(torch.zeros_like, a.hidden)
    first, second = (g.call(operator.getitem, parts, index) for index in range(2))
    g.method("index_add_", out, 0, tokens[0], first)
    early = g.method("mean", out) if read else None
    g.method("index_add_", g.call(torch.ones_like, a.hidden) if other else out, 0, tokens[1], second)
    return g.call(operator.add, out, early) if read else out


def test_parts_that_are_summed_in_turns() -> None:
    layer = Layer()
    gm = layer.g.finish(_in_turns(layer))
    assert dispatch(layer, gm).skipped == ()
    assert sorted(moves(gm)) == sorted(BY_NODE)


# By the reason.
REFUSED: dict[str, dict[str, Callable[[Layer], Node]]] = {
    "not by one sum over the rows of a token": {"rows that are used": _and_read},
    "no sum over the rows of a token": {
        "rows themselves": lambda a: a.experts(),
        "rows of their own": lambda a: a.g.method("index_put", a.hidden, (a.tokens,), a.experts(), False),
        "another order": (
            lambda a: a.summed(a.experts(), a.inverse(a.g.call(torch.argsort, a.g.input(torch.rand(R)))))
        ),
        "an inverse that changes": lambda a: a.summed(a.experts(), _changed(a)),
        "a mean": lambda a: a.g.method("mean", a.g.method("view", _sorted_back(a), T, K, H), dim=1),
        "weights of each value": lambda a: a.summed(a.g.call(operator.mul, a.experts(), a.g.input(torch.rand(R, H)))),
    },
    "no gather by token": {"no gather": lambda a: a.summed(a.experts(a.g.call(operator.mul, a.rows, 2.0)))},
    "another index": {
        "another index": (
            lambda a: a.g.call(
                torch.index_add, a.g.call(torch.zeros_like, a.hidden), 0, a.g.input(torch.arange(R) // K), a.experts()
            )
        )
    },
    "does not put the 2 rows of a token together": {"other choices": lambda a: a.summed(a.experts(), choices=4)},
    "reads a sum before": {"a sum that is read early": lambda a: _in_turns(a, read=True)},
    "summed in different tensors": {"two sums": lambda a: _in_turns(a, other=True)},
}


def _changed(a: Layer) -> Node:
    inverse = a.inverse()
    a.g.method("clamp_", inverse, 0, R)
    return inverse


def _sorted_back(a: Layer) -> Node:
    return a.g.call(operator.getitem, a.experts(), a.inverse())


@pytest.mark.parametrize(
    ("reason", "form"),
    [pytest.param(reason, form, id=name) for reason, forms in REFUSED.items() for name, form in forms.items()],
)
def test_what_is_not_proven_travels_row_by_row(reason: str, form: Callable[[Layer], Node]) -> None:
    layer = Layer()
    gm = layer.g.finish(form(layer))
    outcome = dispatch(layer, gm)
    assert outcome.rewritten == 1
    (skip,) = outcome.skipped
    assert skip.reason.startswith("its rows travel each by itself: ") and reason in skip.reason, skip.reason
    assert not skip.fallback
    assert moves(gm) == ["route", "exchange", "exchange_back"]


def test_weights_from_the_results_stay_outside() -> None:
    layer = Layer()
    g, rows = layer.g, layer.experts()
    gate = g.method("sum", g.call(torch.tanh, rows), -1, True)
    gm = g.finish(layer.summed(g.call(operator.mul, rows, gate)))
    (skip,) = dispatch(layer, gm).skipped
    assert "not by one sum" in skip.reason


def test_on_one_node_and_in_chunks() -> None:
    layer = Layer()
    gm = layer.g.finish(layer.summed(layer.experts()))
    (skip,) = dispatch(layer, gm, nodes=1).skipped
    assert "on one node" in skip.reason and not skip.fallback
    layer = Layer()
    gm = layer.g.finish(layer.summed(layer.experts()))
    (skip,) = dispatch(layer, gm, chunks=2).skipped
    assert skip.reason == "its rows cross to each node once, so its rows travel in one part" and not skip.fallback
    assert sorted(moves(gm)) == sorted(BY_NODE)


SLOW = Rates(flops=1e12, rank_bytes=1e9, node_bytes=1e6)


@pytest.mark.parametrize(
    ("known", "by_node"),
    [
        ({"nodes": 16, "world_size": 32, "rates": SLOW}, False),
        ({"nodes": 2, "world_size": 4, "rates": SLOW}, True),
        ({"nodes": 2, "world_size": 4, "rates": SLOW, "dispatch": "rows"}, False),
        ({"nodes": 2, "world_size": 4, "rates": SLOW, "chunks": 2}, False),
        ({"nodes": 2, "world_size": 4, "rates": SLOW, "tokens": 10}, False),
        ({"nodes": 1, "world_size": 4, "rates": SLOW}, False),
        ({"nodes": 2, "world_size": 4, "rates": Rates(flops=1e12, rank_bytes=1e6, node_bytes=1e6)}, False),
    ],
    ids=["many nodes", "slow link", "as told", "told chunks", "few tokens", "one node", "slow ranks"],
)
def test_nodes_where_they_pay(known: dict[str, Any], by_node: bool) -> None:
    layer = Layer()
    gm = layer.g.finish(layer.summed(layer.weighted(layer.experts())))
    outcome = dispatch(layer, gm, **({"dispatch": "auto", "chunks": "auto", "tokens": 10**7} | known))
    assert outcome.skipped == (() if known.get("chunks") != 2 else outcome.skipped)
    assert ("exchange_nodes" in moves(gm)) == by_node


def test_loops_take_their_weights_in_only_for_nodes() -> None:
    for how in ("rows", "auto", "nodes"):
        g = GraphUnderTest()
        hidden, weight, out = g.input(torch.randn(T, H)), g.experts(H, H), g.input(torch.zeros(T, H))
        for expert in range(E):
            tokens = g.input(torch.randint(0, T, (5 + expert,)))
            y = g.call(
                torch.matmul, g.call(operator.getitem, hidden, tokens), g.call(operator.getitem, weight, expert)
            )
            y = g.call(operator.mul, y, g.input(torch.rand(5 + expert, 1)))
            out = g.call(torch.index_add, out, 0, tokens, y)
        gm = g.finish(out)
        known: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "dispatch": how}
        assert apply(group_expert_loops, g, gm, world_size=4, **known).rewritten == 1
        assert targets(gm).count("mul") == (1 if how == "nodes" else E)
        outcome = apply(exchange_rows, g, gm, world_size=4, **known)
        assert (outcome.rewritten, outcome.skipped) == (1, ())
        assert ("exchange_nodes" in moves(gm)) == (how == "nodes")


def test_the_verifier_finds_a_ticket_of_another_exchange() -> None:
    layer = Layer()
    gm = layer.g.finish(layer.summed(layer.experts()))
    dispatch(layer, gm)
    back = next(n for n in gm.graph.nodes if n.target is torch.ops.hecate.exchange_nodes_back.default)
    args = list(back.args)
    args[2], args[3] = args[3], args[2]
    back.args = tuple(args)
    with pytest.raises(InvalidGraphError, match="no ticket of a route by nodes"):
        verify(gm)
