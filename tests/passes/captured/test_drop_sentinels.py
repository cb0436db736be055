"""Masks as transformers 5.17 writes them around its experts."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes.captured.drop_sentinels import drop_sentinels
from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.functionalize_rows import functionalize_rows
from hecate.passes.captured.normalize_matmuls import normalize_matmuls
from tests.support.graphs import E, GraphUnderTest, H, I, apply, leaves_alone, targets

TOKENS, CHOICES = 8, 2


def experts_with_sentinels(g: GraphUnderTest, *, limit: int = E, chosen: str = "topk", bias: bool = True) -> Node:
    """One layer: routed, guarded, multiplied, guarded, and added up for each token.

    Args:
        limit: the first number that is masked.
        chosen: where expert numbers come from: ``"topk"``, or ``"given"`` with the tokens.
    """
    hidden = g.input(torch.randn(TOKENS, H))
    if chosen == "topk":
        logits = g.call(torch.nn.functional.linear, hidden, g.parameter(E, H))
        numbers = g.call(operator.getitem, g.call(torch.topk, logits, CHOICES, dim=-1), 1)
    else:
        numbers = g.input(torch.randint(0, E, (TOKENS, CHOICES)))
    ordered = g.call(torch.sort, g.method("reshape", numbers, -1))
    ids, perm = g.call(operator.getitem, ordered, 0), g.call(operator.getitem, ordered, 1)
    rows = g.call(operator.getitem, hidden, g.call(operator.floordiv, perm, CHOICES))
    counts = g.call(torch.histc, g.method("float", ids), bins=E, min=0, max=E - 1)
    offsets = g.call(torch.cumsum, counts, dim=0, dtype=torch.int32)
    mask = g.method("unsqueeze", g.call(operator.ge, ids, limit), -1)
    g.method("clamp_", ids, max=E - 1)
    g.method("masked_fill_", rows, mask, 0.0)
    out = g.call(torch.ops.hecate.grouped_mm.default, rows, g.experts(H, I), offsets)
    if bias:
        out = g.call(operator.add, out, g.call(operator.getitem, g.experts(I), ids))
    out = g.method("masked_fill", out, mask, 0.0)
    out = g.call(torch.ops.hecate.grouped_mm.default, g.call(torch.nn.functional.silu, out), g.experts(I, H), offsets)
    out = g.method("masked_fill", out, mask, 0.0)
    back = g.call(torch.argsort, perm)
    return g.method("sum", g.method("view", g.call(operator.getitem, out, back), TOKENS, CHOICES, H), dim=1)


@pytest.mark.parametrize("bias", [True, False])
def test_masks_go_and_rows_travel(bias: bool, g: GraphUnderTest) -> None:
    gm = g.finish(experts_with_sentinels(g, bias=bias))
    assert apply(drop_sentinels, g, gm).rewritten == 4
    assert not {"ge", "clamp_", "masked_fill", "masked_fill_"} & set(targets(gm))
    for function in (normalize_matmuls, functionalize_rows):
        apply(function, g, gm)
    outcome = apply(exchange_rows, g, gm, world_size=2)
    assert outcome.rewritten == 1, outcome.skipped


def test_with_the_masks_nothing_travels(g: GraphUnderTest) -> None:
    """Else there would be no need for the pass."""
    gm = g.finish(experts_with_sentinels(g))
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 0


def test_numbers_that_some_token_may_have_stay_masked(g: GraphUnderTest) -> None:
    gm = g.finish(experts_with_sentinels(g, limit=E - 1))
    # The numbers are below E, so only the clamp does nothing.
    assert apply(drop_sentinels, g, gm).rewritten == 1
    assert targets(gm).count("masked_fill") == 2 and "masked_fill_" in targets(gm)


def test_numbers_from_anywhere_stay_masked(g: GraphUnderTest) -> None:
    leaves_alone(drop_sentinels, g, g.finish(experts_with_sentinels(g, chosen="given")))


def tokens(g: GraphUnderTest) -> Node:
    return g.input(torch.arange(TOKENS))


def best(g: GraphUnderTest) -> Node:
    """Of each token, an expert's number."""
    return g.call(torch.argmax, g.input(torch.randn(TOKENS, E)), dim=1)


def masked(g: GraphUnderTest, numbers: Node) -> GraphModule:
    """Values that are masked where a number is that of no expert."""
    values = g.input(torch.randn(numbers.meta["example_value"].shape))
    return g.finish(g.method("masked_fill", values, g.call(operator.ge, numbers, E), 0.0))


@pytest.mark.parametrize(("divisor", "dropped"), [(E, True), (E - 1, True), (E + 1, False), (-E, False)])
@pytest.mark.parametrize("remainder", [operator.mod, torch.remainder])
def test_a_remainder_is_below_its_divisor(remainder: Any, divisor: int, dropped: bool, g: GraphUnderTest) -> None:
    assert apply(drop_sentinels, g, masked(g, g.call(remainder, tokens(g), divisor))).rewritten == dropped


def test_a_remainder_of_another_tensor_can_be_anything(g: GraphUnderTest) -> None:
    leaves_alone(drop_sentinels, g, masked(g, g.call(torch.remainder, tokens(g), g.input(torch.tensor(E)))))


def test_numbers_that_are_changed_stay_masked(g: GraphUnderTest) -> None:
    logits = g.input(torch.randn(TOKENS, E))
    numbers = g.call(operator.getitem, g.call(torch.topk, logits, CHOICES), 1)
    g.method("add_", g.method("view", numbers, -1), 1)
    leaves_alone(drop_sentinels, g, masked(g, numbers))


def test_a_copy_that_is_changed_stays_a_copy(g: GraphUnderTest) -> None:
    mask = g.call(operator.ge, best(g), E)
    rows = g.call(torch.sin, g.input(torch.randn(TOKENS)))
    copy = g.method("masked_fill", rows, mask, 0.0)
    g.method("mul_", copy, 2.0)
    leaves_alone(drop_sentinels, g, g.finish(g.call(operator.add, rows, copy)))


def test_a_larger_mask_makes_a_larger_result(g: GraphUnderTest) -> None:
    wide = g.method("expand", g.method("unsqueeze", g.call(operator.ge, best(g), E), -1), TOKENS, 3)
    leaves_alone(drop_sentinels, g, g.finish(g.method("masked_fill", g.input(torch.randn(1, 3)), wide, 0.0)))


@pytest.mark.parametrize("way", ["clone", "contiguous", "reshape", "index_select"])
def test_a_copy_of_a_mask_that_is_changed_masks_something(way: str, g: GraphUnderTest) -> None:
    mask = g.call(operator.ge, best(g), E)
    arguments: tuple[Any, ...] = {"reshape": (-1,), "index_select": (0, g.input(torch.arange(TOKENS)))}.get(way, ())
    copy = g.method(way, mask, *arguments)
    g.call(operator.setitem, copy, g.input(torch.arange(2)), True)
    # And a view behind it.
    mask = g.method("unsqueeze", copy, -1)
    leaves_alone(drop_sentinels, g, g.finish(g.method("masked_fill", g.input(torch.randn(TOKENS, 3)), mask, 0.0)))


@pytest.mark.parametrize(
    ("clamp", "limits", "dropped"),
    [
        ("clamp_", {"max": E - 2}, True),
        ("clamp_", {"min": 0, "max": E}, True),
        ("clamp_max_", {"max": 0}, True),
        ("clamp_", {"min": E + 1}, False),
        ("clamp_", {"min": 1}, False),
        ("clamp_", {"max": -1}, False),
    ],
)
def test_what_a_clamp_makes_of_numbers(clamp: str, limits: dict[str, int], dropped: bool, g: GraphUnderTest) -> None:
    numbers = best(g)
    g.method(clamp, numbers, **limits)
    gm = masked(g, numbers)
    apply(drop_sentinels, g, gm)
    assert ("masked_fill" not in targets(gm)) == dropped
