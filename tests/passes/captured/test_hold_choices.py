"""Routers' choices, in the operations and shapes in which models make them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hecate.passes.captured.hold_choices import hold_choices
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state.layer import ChoicePart, get_layer
from tests.support.graphs import E, GraphUnderTest, H, apply, leaves_alone, number_of, targets
from tests.support.layers import add_layer

TOKENS, CHOICES = 6, 2


@pytest.fixture(autouse=True)
def nothing_held(g: GraphUnderTest) -> Iterator[None]:
    yield
    get_layer(g.layer).choices = None


def scores_of(g: GraphUnderTest, *leading: int) -> Node:
    return g.method("softmax", g.input(torch.randn(*(leading or (TOKENS,)), E)), -1)


def experts(g: GraphUnderTest, ids: Node, weights: Node, layer: int | None = None) -> Node:
    """Looked-up experts of every token ``[..., k]``, weighted and summed."""
    own, g.layer = g.layer, g.layer if layer is None else layer
    matrices = g.experts(H)
    g.layer = own
    found = g.call(operator.getitem, matrices, ids)
    return g.method("sum", g.call(operator.mul, found, g.method("unsqueeze", weights, -1)), -2)


def top(g: GraphUnderTest, scores: Node, **options: Any) -> tuple[Node, Node]:
    values, ids = g.parts(g.call(torch.topk, scores, CHOICES, **options), 2)
    return values, ids


def held_with(g: GraphUnderTest, gm: GraphModule, given: Tensor) -> Tensor:
    """What the graph computes if tokens go to given experts ``[T, k]``."""

    def choose(ids: Tensor, part: ChoicePart) -> Tensor:
        assert part.total == given.shape[1]
        return given[:, part.first : part.first + part.count].reshape(ids.shape)

    get_layer(g.layer).choices = choose
    return gm(*g.inputs)[0]


def drawn(count: int = CHOICES) -> Tensor:
    return torch.rand(TOKENS, E).topk(count).indices


@pytest.mark.parametrize("leading", [(TOKENS,), (2, TOKENS // 2)])
def test_a_topk_and_its_values(leading: tuple[int, ...], g: GraphUnderTest) -> None:
    scores = scores_of(g, *leading)
    values, ids = top(g, scores, dim=-1, sorted=False)
    gm = g.finish(experts(g, ids, values))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    assert "hold_choices.default" in targets(gm) and "gather" in targets(gm)
    given = drawn()
    probabilities, matrices = g.inputs[0].softmax(-1).flatten(0, -2), g.inputs[1]
    expected = (matrices[given] * probabilities.gather(1, given)[..., None]).sum(-2)
    torch.testing.assert_close(held_with(g, gm, given).flatten(0, -2), expected)


def test_scores_that_are_gathered_by_the_model(g: GraphUnderTest) -> None:
    """As DeepSeek-V3 does: of the top-k over biased scores only the places are used."""
    scores = scores_of(g)
    biased = g.call(operator.add, scores, g.input(torch.randn(E)))
    _, ids = top(g, biased)
    gm = g.finish(experts(g, ids, g.method("gather", scores, 1, ids)))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    given = drawn()
    expected = (g.inputs[2][given] * g.inputs[0].softmax(-1).gather(1, given)[..., None]).sum(-2)
    torch.testing.assert_close(held_with(g, gm, given), expected)


@pytest.mark.parametrize("choose", [torch.max, torch.argmax])
@pytest.mark.parametrize("keepdim", [True, False])
def test_one_expert_for_each_token(choose: Callable[..., Any], keepdim: bool, g: GraphUnderTest) -> None:
    scores = scores_of(g)
    chosen = g.call(choose, scores, dim=-1, keepdim=keepdim)
    if choose is torch.max:
        values, ids = g.parts(chosen, 2)
    else:
        kept = chosen if keepdim else g.method("unsqueeze", chosen, -1)
        values, ids = g.method("gather", scores, -1, kept), chosen
        values = values if keepdim else g.method("squeeze", values, -1)
    if not keepdim:
        values, ids = g.method("unsqueeze", values, -1), g.method("unsqueeze", ids, -1)
    gm = g.finish(experts(g, ids, values))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    given = drawn(1)
    expected = (g.inputs[1][given] * g.inputs[0].softmax(-1).gather(1, given)[..., None]).sum(-2)
    torch.testing.assert_close(held_with(g, gm, given), expected)


@pytest.mark.parametrize("first", ["place", "score"])
@pytest.mark.parametrize("keepdim", [True, False])
def test_the_largest_score_is_that_of_the_held_expert(keepdim: bool, first: str, g: GraphUnderTest) -> None:
    """As Switch Transformers: an argmax, and the score by another operation."""
    logits = g.input(torch.randn(TOKENS, E))
    scores = g.method("softmax", g.call(operator.sub, logits, g.call(torch.amax, logits, -1, True)), -1)
    if first == "place":
        ids = g.method("unsqueeze", g.call(torch.argmax, scores, dim=-1), -1)
    largest = g.parts(g.call(torch.max, scores, dim=-1, keepdim=keepdim), 2)[0]
    if first == "score":
        largest = g.call(operator.mul, largest, 1.0)
        ids = g.method("unsqueeze", g.call(torch.argmax, scores, dim=-1), -1)
    gm = g.finish(experts(g, ids, largest if keepdim else g.method("unsqueeze", largest, -1)))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    assert "amax" in targets(gm)
    given = drawn(1)
    expected = (g.inputs[1][given] * g.inputs[0].softmax(-1).gather(1, given)[..., None]).sum(-2)
    torch.testing.assert_close(held_with(g, gm, given), expected)


def test_two_choices_one_after_the_other(g: GraphUnderTest) -> None:
    """As GShard's gate: the second among the scores without the first."""
    scores = scores_of(g)
    first = g.call(torch.argmax, scores, dim=1)
    mask = g.method("bool", g.call(torch.nn.functional.one_hot, first, E))
    second = g.call(torch.argmax, g.method("masked_fill", scores, mask, -1.0), dim=1)
    ids = g.call(torch.stack, [first, second], 1)
    gm = g.finish(experts(g, ids, g.method("gather", scores, 1, ids)))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    assert targets(gm).count("hold_choices.default") == 2
    given = drawn()
    expected = (g.inputs[1][given] * g.inputs[0].softmax(-1).gather(1, given)[..., None]).sum(-2)
    torch.testing.assert_close(held_with(g, gm, given), expected)


def test_experts_that_are_looked_up_by_token(g: GraphUnderTest) -> None:
    """As DeepSeek-V4's first layers: a table says where a token goes, and scores are its weights."""
    table = torch.nn.Parameter(torch.randint(0, E, (9, CHOICES)), requires_grad=False)
    ids = g.call(operator.getitem, g.input(table), g.input(torch.randint(0, 9, (TOKENS,))))
    gm = g.finish(experts(g, ids, g.method("gather", scores_of(g), 1, ids)))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    given = drawn()
    expected = (g.inputs[3][given] * g.inputs[2].softmax(-1).gather(1, given)[..., None]).sum(-2)
    torch.testing.assert_close(held_with(g, gm, given), expected)


def test_each_layer_has_its_own_router(g: GraphUnderTest) -> None:
    other = number_of(add_layer(name="other", owners=Owners.contiguous(E, 1), world=SINGLE))
    values, ids = top(g, scores_of(g))
    hidden = experts(g, ids, values)
    scores = g.method("softmax", g.call(torch.nn.functional.linear, hidden, g.parameter(E, H)), -1)
    values, ids = top(g, scores)
    gm = g.finish(experts(g, ids, values, other))
    assert apply(hold_choices, g, gm, held={g.layer: E, other: E}).rewritten == 2
    layers = [node.args[-1] for node in gm.graph.nodes if "hold_choices" in str(node.target)]
    assert layers == [g.layer, other]


def test_groups_of_experts_are_not_chosen_from_outside(g: GraphUnderTest) -> None:
    """As in group-limited routing: a group's score is the sum of its best, and groups are fewer than experts."""
    scores = scores_of(g)
    grouped = g.method("view", scores, TOKENS, 2, E // 2)
    best = g.method("sum", g.parts(g.call(torch.topk, grouped, 2), 2)[0], -1)
    (_, group) = g.parts(g.call(torch.topk, best, 1), 2)
    mask = g.method("repeat_interleave", g.method("bool", g.method("scatter", best, 1, group, 2.0)), E // 2, 1)
    values, ids = top(g, g.call(operator.mul, scores, mask))
    gm = g.finish(experts(g, ids, values))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    assert targets(gm).count("hold_choices.default") == 1


def routed(g: GraphUnderTest) -> tuple[Node, Node]:
    """Hidden states ``[T, H]``, and a router's logits."""
    hidden = g.input(torch.randn(TOKENS, H))
    return hidden, g.call(torch.nn.functional.linear, hidden, g.parameter(E, H))


def test_scores_are_those_before_a_mask(g: GraphUnderTest) -> None:
    """As in group-limited routing, whose scores of other groups are zero."""
    scores = scores_of(g)
    # Some tokens have no more than one expert of their own.
    mask = g.input(torch.rand(TOKENS, E) > 0.3)
    values, ids = top(g, g.method("masked_fill", scores, mask, 0.0))
    gm = g.finish(experts(g, ids, values))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    given = drawn()
    plain = g.inputs[0].softmax(-1)
    masked = plain.masked_fill(g.inputs[1], 0.0)
    own = masked.topk(CHOICES).indices
    weights = torch.where(own == given, masked.gather(1, given), plain.gather(1, given))
    torch.testing.assert_close(held_with(g, gm, given), (g.inputs[2][given] * weights[..., None]).sum(-2))


@pytest.mark.parametrize("how", ["topk", "max", "sort"])
def test_weights_by_another_operation_are_not_held(how: str, g: GraphUnderTest) -> None:
    """Places of the largest logits, and weights that are the largest probabilities: of other experts, if held."""
    _, logits = routed(g)
    ids = g.parts(g.call(torch.topk, logits, 1 if how == "max" else CHOICES), 2)[1]
    scores = g.method("softmax", logits, -1)
    if how == "topk":
        weights = g.parts(g.call(torch.topk, scores, CHOICES), 2)[0]
    elif how == "max":
        weights = g.parts(g.call(torch.max, scores, dim=-1, keepdim=True), 2)[0]
    else:
        ordered = g.parts(g.call(torch.sort, scores, descending=True), 2)[0]
        weights = g.call(operator.getitem, ordered, (slice(None), slice(CHOICES)))
    outcome = leaves_alone(hold_choices, g, g.finish(experts(g, ids, weights)), held={g.layer: E})
    assert "would stay those of its own choice" in outcome.skipped[0].reason


def test_the_largest_score_may_mask_and_keep_exponentials_in_range(g: GraphUnderTest) -> None:
    """As PhiMoE's router."""
    _, logits = routed(g)
    largest = g.method("detach", g.parts(g.call(torch.max, logits, dim=-1, keepdim=True), 2)[0])
    low = g.call(operator.lt, logits, g.call(operator.sub, largest, 3.0))
    scores = g.method("softmax", g.call(operator.sub, logits, largest), -1)
    values, ids = top(g, g.method("masked_fill", scores, low, 0.0))
    assert apply(hold_choices, g, g.finish(experts(g, ids, values)), held={g.layer: E}).rewritten == 1


def test_a_confidence_in_a_loss_is_no_weight(g: GraphUnderTest) -> None:
    _, logits = routed(g)
    values, ids = top(g, g.method("softmax", logits, -1))
    sure = g.method("mean", g.call(torch.amax, g.method("softmax", logits, -1), -1))
    out = g.call(operator.add, experts(g, ids, values), sure)
    assert apply(hold_choices, g, g.finish(out), held={g.layer: E}).rewritten == 1


def test_scores_that_are_masked_in_place(g: GraphUnderTest) -> None:
    scores = g.call(operator.mul, scores_of(g), 1.0)
    g.method("masked_fill_", scores, g.input(torch.rand(TOKENS, E) > 0.8), 0.0)
    values, ids = top(g, scores)
    outcome = leaves_alone(hold_choices, g, g.finish(experts(g, ids, values)), held={g.layer: E})
    assert "masked in place" in outcome.skipped[0].reason


@pytest.mark.parametrize("method", [True, False])
def test_scores_are_those_before_a_where(method: bool, g: GraphUnderTest) -> None:
    scores, mask = scores_of(g), g.input(torch.rand(TOKENS, E) > 0.3)
    masked = g.method("where", scores, mask, 0.0) if method else g.call(torch.where, mask, scores, 0.0)
    values, ids = top(g, masked)
    gm = g.finish(experts(g, ids, values))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    assert targets(gm).count("gather") == 2


@pytest.mark.parametrize("found", [True, False])
def test_attention_to_as_many_keys_as_experts(found: bool, g: GraphUnderTest) -> None:
    """The keys that a token attends to are no experts, though they may be as many."""
    hidden = g.input(torch.randn(E, H))
    keys, queries = (g.call(torch.nn.functional.linear, hidden, g.parameter(H, H)) for _ in range(2))
    likeness = g.call(torch.matmul, queries, g.method("t", keys))
    seen = g.parts(g.call(torch.topk, likeness, CHOICES), 2)[1]
    mask = g.method("scatter", g.method("new_full", likeness, (E, E), -9.0), -1, seen, 0.0)
    attended = g.call(torch.matmul, g.method("softmax", g.call(operator.add, likeness, mask), -1), hidden)
    scores = g.method("softmax", g.call(torch.nn.functional.linear, attended, g.parameter(E, H)), -1)
    if found:
        values, ids = top(g, scores)
    else:
        values, ids = (
            g.call(operator.getitem, part, (slice(None), slice(CHOICES)))
            for part in g.parts(g.call(torch.sort, scores, descending=True), 2)
        )
    gm = g.finish(experts(g, ids, values))
    if found:
        assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
        assert targets(gm).count("hold_choices.default") == 1
    else:
        assert leaves_alone(hold_choices, g, gm, held={g.layer: E}).skipped


def test_a_choice_that_masks_another_is_no_part_of_it(g: GraphUnderTest) -> None:
    _, logits = routed(g)
    allowed = g.parts(g.call(torch.topk, logits, CHOICES + 1), 2)[1]
    mask = g.method("scatter", g.method("new_zeros", logits, (TOKENS, E)), -1, allowed, 1.0)
    values, ids = top(g, g.call(operator.mul, g.method("softmax", logits, -1), mask))
    gm = g.finish(experts(g, ids, values))
    assert apply(hold_choices, g, gm, held={g.layer: E}).rewritten == 1
    assert targets(gm).count("hold_choices.default") == 1


def test_nothing_is_held(g: GraphUnderTest) -> None:
    values, ids = top(g, scores_of(g))
    gm = g.finish(experts(g, ids, values))
    leaves_alone(hold_choices, g, gm)


@pytest.mark.parametrize("how", ["other dimension", "other experts", "integers", "unused"])
def test_what_no_router_chooses(how: str, g: GraphUnderTest) -> None:
    scores = scores_of(g)
    ids = g.input(torch.randint(0, E, (TOKENS, CHOICES)))
    if how == "other dimension":
        ids = g.parts(g.call(torch.topk, g.input(torch.randn(TOKENS, E)), CHOICES, dim=0), 2)[1]
        ids = g.method("remainder", ids, E)
        scores = g.method("narrow", scores, 0, 0, CHOICES)
    elif how == "other experts":
        ids = g.parts(g.call(torch.topk, g.input(torch.randn(TOKENS, E - 1)), CHOICES), 2)[1]
    elif how == "integers":
        ids = g.parts(g.call(torch.topk, g.input(torch.randint(0, E, (TOKENS, E))), CHOICES), 2)[1]
    else:
        top(g, scores)
    gm = g.finish(experts(g, ids, g.method("gather", scores, 1, ids)))
    outcome = leaves_alone(hold_choices, g, gm, held={g.layer: E})
    assert [skip.where for skip in outcome.skipped] == ["model.experts"]
