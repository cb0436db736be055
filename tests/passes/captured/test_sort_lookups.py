"""Experts that are looked up for every token, as gpt-fast and gpt-oss write them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.functionalize_rows import functionalize_rows
from hecate.passes.captured.sort_lookups import sort_lookups
from tests.support.graphs import E, GraphUnderTest, H, I, apply, leaves_alone, targets

TOKENS, CHOICES = 6, 2


def choose(g: GraphUnderTest, hidden: Node, *, choices: int = CHOICES) -> tuple[Node, Node]:
    """Weights and numbers of the experts of each token, ``[T, k]``."""
    scores = g.call(operator.matmul, hidden, g.parameter(H, E))
    weights, ids = g.parts(g.call(torch.topk, scores, choices, dim=-1), 2)
    return weights, ids


def gpt_fast(g: GraphUnderTest, between: Callable[[Node], Node] | None = None) -> GraphModule:
    hidden = g.input(torch.randn(TOKENS, H))
    weights, ids = choose(g, hidden)
    w1, w3, w2 = (g.call(operator.getitem, w, ids) for w in (g.experts(I, H), g.experts(I, H), g.experts(H, I)))
    x1 = g.call(torch.nn.functional.silu, g.call(torch.einsum, "ti,taoi -> tao", hidden, w1))
    x = g.call(operator.mul, x1, g.call(torch.einsum, "ti, taoi -> tao", hidden, w3))
    outs = g.call(torch.einsum, "tao, taio -> tai", between(x) if between is not None else x, w2)
    return g.finish(g.call(torch.einsum, "tai,ta -> ti", outs, weights))


def gpt_oss(g: GraphUnderTest) -> GraphModule:
    hidden = g.input(torch.randn(TOKENS, H))
    weights, ids = choose(g, hidden)
    w1, b1, w2, b2 = (
        g.call(operator.getitem, w, (ids, Ellipsis))
        for w in (g.experts(2 * I, H), g.experts(2 * I), g.experts(H, I), g.experts(H))
    )
    t = g.call(operator.add, g.call(torch.einsum, "beck,bk->bec", w1, hidden), b1)
    gate, up = (g.call(operator.getitem, t, (Ellipsis, slice(start, None, 2))) for start in (0, 1))
    t = g.call(operator.mul, g.method("clamp", gate, None, 7.0), g.call(operator.add, up, 1))
    t = g.call(torch.einsum, "beck,bek->bec", w2, t)
    t = g.call(operator.iadd, t, b2)
    return g.finish(g.call(torch.einsum, "bec,be->bc", t, weights))


def flat(g: GraphUnderTest) -> GraphModule:
    """One expert for each row, and matrices [E, in, out]."""
    hidden = g.input(torch.randn(TOKENS, H))
    _, ids = choose(g, hidden, choices=1)
    ids = g.method("squeeze", ids, -1)
    h = g.call(torch.einsum, "rd,rdf->rf", hidden, g.call(operator.getitem, g.experts(H, I), ids))
    h = g.call(torch.nn.functional.gelu, h)
    return g.finish(g.call(torch.einsum, "rf,rfd->rd", h, g.call(operator.getitem, g.experts(I, H), ids)))


@pytest.mark.parametrize("spelling", [gpt_fast, gpt_oss, flat])
def test_rows_are_sorted_and_exchanged(spelling: Callable[[GraphUnderTest], GraphModule], g: GraphUnderTest) -> None:
    gm = spelling(g)
    apply(functionalize_rows, g, gm)
    outcome = apply(sort_lookups, g, gm)
    assert (outcome.rewritten, outcome.skipped) == (1, ())
    assert targets(gm).count("grouped_mm.default") == (3 if spelling is gpt_fast else 2)
    assert "gather_experts" not in {
        str(node.args[0].target) for node in gm.graph.nodes if node.target is operator.getitem and node.users
    }
    outcome = apply(exchange_rows, g, gm, world_size=2)
    assert (outcome.rewritten, outcome.skipped) == (1, ())


REFUSED: dict[str, Any] = {
    "over choices": lambda g, x: g.call(torch.softmax, x, 1),
    "over tokens": lambda g, x: g.call(operator.sub, x, g.method("mean", x, 0, True)),
    "weighted by own tokens": lambda g, x: g.call(operator.mul, x, g.input(torch.rand(TOKENS, CHOICES, 1))),
}


@pytest.mark.parametrize("between", REFUSED.values(), ids=REFUSED)
def test_refuses_what_mixes_tokens(between: Any, g: GraphUnderTest) -> None:
    outcome = leaves_alone(sort_lookups, g, gpt_fast(g, lambda x: between(g, x)))
    assert "experts that are looked up" in outcome.skipped[0].reason


def test_refuses_numbers_that_may_be_of_no_expert(g: GraphUnderTest) -> None:
    hidden, ids = g.input(torch.randn(TOKENS, H)), g.input(torch.randint(0, E, (TOKENS,)))
    out = g.call(torch.einsum, "td,tdf->tf", hidden, g.call(operator.getitem, g.experts(H, I), ids))
    outcome = leaves_alone(sort_lookups, g, g.finish(out))
    assert "from a topk or argmax" in outcome.skipped[0].reason


def test_a_part_of_the_experts_stays(g: GraphUnderTest) -> None:
    hidden = g.input(torch.randn(TOKENS, H))
    _, ids = g.parts(g.call(torch.topk, g.call(operator.matmul, hidden, g.parameter(H, 2)), 1), 2)
    some = g.call(operator.getitem, g.experts(H, I), slice(None, 2))
    out = g.call(torch.einsum, "ti,taio->tao", hidden, g.call(operator.getitem, some, ids))
    leaves_alone(sort_lookups, g, g.finish(out))


def test_a_width_that_is_broadcast_stays(g: GraphUnderTest) -> None:
    hidden = g.input(torch.randn(TOKENS, H))
    _, ids = choose(g, hidden)
    column = g.call(operator.getitem, hidden, (slice(None), slice(None, 1)))
    out = g.call(torch.einsum, "ti,taio->tao", column, g.call(operator.getitem, g.experts(H, I), ids))
    leaves_alone(sort_lookups, g, g.finish(out))


def test_rows_that_are_broadcast_stay(g: GraphUnderTest) -> None:
    hidden, one = g.input(torch.randn(TOKENS, H)), g.input(torch.randn(1, H))
    _, ids = choose(g, hidden)
    out = g.call(torch.einsum, "ti,taio->tao", one, g.call(operator.getitem, g.experts(H, I), ids))
    leaves_alone(sort_lookups, g, g.finish(out))


@pytest.mark.parametrize("equation", ["ti,taoi->tao", "ti,taoj->tao", "ti,taoi->toa", "ti,atoi->tao"])
def test_other_einsums_stay(equation: str, g: GraphUnderTest) -> None:
    """Square matrices hide which dimension is meant; letters tell."""
    hidden = g.input(torch.randn(CHOICES, H))
    _, ids = choose(g, hidden)
    out = g.call(torch.einsum, equation, hidden, g.call(operator.getitem, g.experts(H, H), ids))
    gm = g.finish(out)
    if equation == "ti,taoi->tao":
        assert apply(sort_lookups, g, gm).rewritten == 1
    else:
        leaves_alone(sort_lookups, g, gm)
