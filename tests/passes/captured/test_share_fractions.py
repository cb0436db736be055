"""Load-balancing losses, as they are written."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes import PassContext
from hecate.passes.captured.share_fractions import share_fractions
from hecate.passes.invariants import verify
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from tests.support.graphs import E, GraphUnderTest, apply, leaves_alone, number_of, targets
from tests.support.layers import add_layer
from tests.support.threads import on_threads

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


@pytest.mark.parametrize(
    "how",
    [
        "sequences",
        "other scores",
        "no choice",
        "no gradient",
        "scaled",
        "of another number",
        "rounded",
        "changed in place",
        "counts changed in place",
    ],
)
def test_other_products(how: str, g: GraphUnderTest) -> None:
    leading = (2, TOKENS) if how == "sequences" else (TOKENS,)
    scores = scores_of(g, *leading)
    fractions = g.method("mean", chosen_for(g, scores), dim=(1, 2) if how == "sequences" else (0, 1))
    if how == "no choice":
        fractions = g.method("mean", g.input(torch.rand(TOKENS, E)), dim=0)
    elif how == "scaled":
        fractions = g.call(operator.truediv, fractions, 0.125)
    elif how in ("of another number", "rounded", "counts changed in place"):
        counts = g.method("sum", chosen_for(g, scores), dim=(0, 1))
        number = 5.0 if how == "of another number" else float(TOKENS)
        rounding = {"rounding_mode": "floor"} if how == "rounded" else {}
        fractions = g.call(torch.div, counts, number, **rounding)
        if how == "counts changed in place":
            g.method("zero_", counts)
    elif how == "changed in place":
        g.method("clamp_", fractions, max=0.1)
    source = scores_of(g) if how == "other scores" else scores
    means = g.method("mean", source, dim=1 if how == "sequences" else 0)
    if how != "no gradient":
        learns(means)
    gm = g.finish(g.method("sum", g.call(operator.mul, fractions, means)))
    leaves_alone(share_fractions, g, gm, shares_fractions=True, world_size=2)


def test_nobody_asked(g: GraphUnderTest) -> None:
    scores = scores_of(g)
    fractions = g.method("mean", chosen_for(g, scores), dim=(0, 1))
    gm = g.finish(g.method("sum", g.call(operator.mul, fractions, learns(g.method("mean", scores, dim=0)))))
    leaves_alone(share_fractions, g, gm, world_size=2)


def ranks_of(build: Callable[..., GraphModule], parts: list[torch.Tensor]) -> list[float]:
    """What the rewritten graph computes on ranks, each with its own scores."""
    found = [0.0] * len(parts)

    def on_rank(world: World) -> None:
        g = GraphUnderTest()
        g.layer = number_of(add_layer(name="test", owners=Owners.contiguous(E, world.size), world=world))
        gm = build(g, parts[world.rank])
        assert (
            share_fractions(
                gm, PassContext(world_size=3, shares_fractions=True, layer_names={g.layer: "x"})
            ).rewritten
            == 1
        )
        verify(gm)
        gm.recompile()
        found[world.rank] = float(gm(*g.inputs)[0])

    on_threads(on_rank, ranks=len(parts))
    return found


@pytest.mark.parametrize("how", ["means", "counts", "whole counts", "cast beside another", "half", "two dimensions"])
def test_the_mean_over_ranks_is_the_loss_of_all_tokens(how: str) -> None:
    dtype = torch.float16 if how == "half" else torch.float32
    lengths = (4, 9, 2) if how != "half" else (40_000, 30_000, 20_000)
    parts = [torch.randn(length, E).softmax(-1).to(dtype) for length in lengths]

    def build(g: GraphUnderTest, own: torch.Tensor) -> GraphModule:
        scores = g.call(operator.mul, g.input(own), 1.0)
        scores.meta["example_value"].requires_grad_()
        chosen = chosen_for(g, scores)
        if "counts" in how:
            counts = g.method("sum", chosen, dim=(0, 1))
            counts = g.method("long", counts) if how == "whole counts" else counts
            fractions = g.call(operator.truediv, counts, float(CHOICES * len(own)))
        else:
            fractions = g.method("mean", chosen, dim=0 if how != "two dimensions" else (0, 1))
        means = learns(g.method("mean", scores, dim=0))
        if how == "cast beside another":
            fractions = g.method("type_as", fractions, means)
        return g.finish(g.method("sum", g.method("float", g.call(operator.mul, fractions, means))))

    g = GraphUnderTest()
    whole = torch.cat(parts)
    expected = float(build(g, whole)(*g.inputs)[0])
    found = ranks_of(build, parts)
    own = [float(build(one, part)(*one.inputs)[0]) for part in parts for one in (GraphUnderTest(),)]
    assert sum(found) / len(found) == pytest.approx(expected, rel=2e-3 if how == "half" else 1e-5)
    if how != "half":
        assert sum(own) / len(own) != pytest.approx(expected, rel=1e-3)
