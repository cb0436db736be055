"""Load-balancing losses, as they are written."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Node

from hecate.passes.captured.share_fractions import share_fractions
from tests.support.graphs import E, GraphUnderTest, apply, leaves_alone, targets

TOKENS, CHOICES = 6, 2


def scores_of(g: GraphUnderTest, *leading: int) -> Node:
    """Scores ``[..., E]`` that have a gradient, in the graph as it was traced."""
    scores = g.method("softmax", g.input(torch.randn(*(leading or (TOKENS,)), E)), -1)
    scores.meta["example_value"].requires_grad_()
    return scores


def learns(node: Node) -> Node:
    node.meta["example_value"].requires_grad_()
    return node


def chosen_for(g: GraphUnderTest, scores: Node) -> Node:
    """Whether each choice ``[T, k, E]`` of a token is an expert."""
    ids = g.parts(g.call(torch.topk, scores, CHOICES, dim=-1), 2)[1]
    return g.method("float", g.call(torch.nn.functional.one_hot, ids, E))


def shared(g: GraphUnderTest, fractions: Node, means: Node) -> list[str]:
    gm = g.finish(g.method("sum", g.call(operator.mul, means, fractions)))
    assert apply(share_fractions, g, gm, shares_fractions=True, world_size=2).rewritten == 1
    return targets(gm)


def test_means(g: GraphUnderTest) -> None:
    scores = scores_of(g)
    fractions = g.method("mean", chosen_for(g, scores), dim=0)
    means = learns(g.method("mean", scores, dim=0))
    assert shared(g, fractions, g.method("unsqueeze", means, 0)).count("average_fractions.default") == 1


def test_means_over_two_dimensions(g: GraphUnderTest) -> None:
    scores = scores_of(g, 2, TOKENS)
    fractions = g.call(torch.mean, chosen_for(g, scores), (0, 1, 2))
    shared(g, fractions, learns(g.call(torch.mean, scores, dim=(0, 1))))


@pytest.mark.parametrize("rows", ["number", "tensor"])
def test_counts_that_are_divided(rows: str, g: GraphUnderTest) -> None:
    """As transformers does, with the number of tokens, or of those that are no padding."""
    scores = scores_of(g)
    ids = g.parts(g.call(torch.topk, scores, CHOICES, dim=-1), 2)[1]
    counts = g.call(torch.histc, g.method("float", g.method("reshape", ids, -1)), bins=E, min=0, max=E)
    number: Any = float(TOKENS)
    if rows == "tensor":
        number = g.method("sum", g.input(torch.ones(TOKENS, dtype=torch.int64)))
    fractions = g.call(operator.truediv, counts, number)
    means = learns(g.call(operator.truediv, learns(g.method("sum", scores, dim=0)), number))
    shared(g, fractions, g.method("unsqueeze", means, 0))


@pytest.mark.parametrize("how", ["sequences", "other scores", "no choice", "no gradient"])
def test_other_products(how: str, g: GraphUnderTest) -> None:
    leading = (2, TOKENS) if how == "sequences" else (TOKENS,)
    scores = scores_of(g, *leading)
    fractions = g.method("mean", chosen_for(g, scores), dim=(1, 2) if how == "sequences" else (0, 1))
    if how == "no choice":
        fractions = g.method("mean", g.input(torch.rand(TOKENS, E)), dim=0)
    source = scores_of(g) if how == "other scores" else scores
    means = g.method("mean", source, dim=1 if how == "sequences" else 0)
    if how != "no gradient":
        learns(means)
    gm = g.finish(g.method("sum", g.call(operator.mul, fractions, means)))
    leaves_alone(share_fractions, g, gm, shares_fractions=True, world_size=2)


@pytest.mark.parametrize("options", [{"world_size": 2}, {"shares_fractions": True, "world_size": 1}])
def test_nobody_asked(options: dict[str, Any], g: GraphUnderTest) -> None:
    scores = scores_of(g)
    fractions = g.method("mean", chosen_for(g, scores), dim=(0, 1))
    gm = g.finish(g.method("sum", g.call(operator.mul, fractions, learns(g.method("mean", scores, dim=0)))))
    leaves_alone(share_fractions, g, gm, **options)
