from __future__ import annotations

import operator
from collections.abc import Callable, Container
from functools import partial
from itertools import product

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.group_expert_loops import group_expert_loops
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.placement.owners import Owners
from tests.support.graphs import E, GraphUnderTest, H, I, R, apply, leaves_alone, number_of, targets
from tests.support.layers import add_layer


def loop(
    g: GraphUnderTest,
    *,
    calls: int = 1,
    turns: int = 1,
    in_place: bool = True,
    odd: Container[tuple[int, int]] = (),
    missing: tuple[int, int] | None = None,
    across: bool = False,
) -> GraphModule:
    """The layer as a loop over experts, on its own combined results when it is called again.

    Args:
        turns: of each expert in each call, on other rows: 1, 2, 3, 4 of them, then 4, 3, 2, 1.
        odd: turns and experts with another activation.
        missing: the turn and the expert that are left out.
        across: rows are mixed in between.
    """
    hidden, w_in, w_out, bias = g.input(torch.randn(R, H)), g.experts(H, I), g.experts(H, I), g.experts(H)
    for _ in range(calls):
        out = g.call(torch.zeros_like, hidden)
        for turn, expert in product(range(turns), range(E)):
            if (turn, expert) == missing:
                continue
            index = g.input(torch.arange(E - expert if turn else expert + 1))
            h = g.call(operator.getitem, hidden, index)
            h = g.call(operator.matmul, h, g.call(operator.getitem, w_in, expert))
            h = g.call(torch.relu if (turn, expert) in odd else torch.nn.functional.silu, h)
            if across:
                h = g.call(operator.sub, h, g.method("mean", h, 0, True))
            h = g.call(operator.matmul, h, g.method("t", g.call(operator.getitem, w_out, expert)))
            h = g.call(operator.add, h, g.call(operator.getitem, bias, expert))
            if in_place:
                g.method("index_add_", out, 0, index, h)
            else:
                out = g.call(torch.index_add, out, 0, index, h)
        hidden = g.call(operator.add, hidden, g.call(torch.tanh, out))
    return g.finish(hidden)


def test_rewrites_a_loop_and_then_exchanges_it(g: GraphUnderTest) -> None:
    gm = loop(g)
    assert apply(group_expert_loops, g, gm).rewritten == 1
    names = targets(gm)
    assert names.count("grouped_mm.default") == 2
    assert names.count("matmul") == 0
    assert names.count("index_add_") == E
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def test_refuses_turns_that_differ_or_are_missing_or_mix_rows() -> None:
    for options, reason in (
        ({"odd": [(0, 2)]}, "another way"),
        ({"missing": (0, 1)}, "never used"),
        ({"across": True}, "keep rows apart"),
        ({"turns": 2, "missing": (1, 2)}, "expert 2 has 1 turns, expert 0 has 2"),
    ):
        g = GraphUnderTest()
        outcome = leaves_alone(group_expert_loops, g, loop(g, **options))
        assert reason in outcome.skipped[0].reason


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("calls", "turns"), [(1, 2), (2, 1), (2, 2)])
def test_several_calls_and_turns_of_each_expert(calls: int, turns: int, in_place: bool, g: GraphUnderTest) -> None:
    gm = loop(g, calls=calls, turns=turns, in_place=in_place)
    outcome = apply(group_expert_loops, g, gm)
    assert (outcome.rewritten, outcome.skipped) == (1, ())
    names = targets(gm)
    assert names.count("grouped_mm.default") == 2 * calls and names.count("matmul") == 0
    assert names.count("sizes_to_offsets.default") == calls
    assert names.count("index_add_" if in_place else "index_add") == calls * turns * E
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1
    assert targets(gm).count("route.default") == calls and targets(gm).count("place.default") == 1


def test_the_same_rows_travel_where_they_are_less_than_the_experts(g: GraphUnderTest) -> None:
    few = (2 * H * I) // (2 * H)
    gm = same_rows(g, (R,))
    outcome = leaves_alone(group_expert_loops, g, gm, world_size=2, tokens=few + 1)
    assert f"the same {few + 1} rows, which take longer" in outcome.skipped[0].reason
    assert apply(group_expert_loops, g, gm, world_size=2, tokens=few).rewritten == 1


@pytest.mark.parametrize("lead", [(R,), (2, 3)])
def test_the_same_rows_for_every_expert(lead: tuple[int, ...], g: GraphUnderTest) -> None:
    gm = same_rows(g, lead)
    assert apply(group_expert_loops, g, gm).rewritten == 1
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def same_rows(g: GraphUnderTest, lead: tuple[int, ...]) -> GraphModule:
    """All experts compute on all tokens, and their results are stacked."""
    hidden, w_in, w_out = g.input(torch.randn(*lead, H)), g.experts(H, I), g.experts(I, H)
    outs = []
    for expert in range(E):
        h = g.call(operator.matmul, hidden, g.call(operator.getitem, w_in, expert))
        h = g.call(operator.mul, g.call(torch.nn.functional.silu, h), 2.0)
        outs.append(g.call(operator.matmul, h, g.call(operator.getitem, w_out, expert)))
    return g.finish(g.call(torch.stack, outs))


def chunks(g: GraphUnderTest, between: Callable[[Node], Node], *, lead: tuple[int, ...] = (1,)) -> GraphModule:
    """Capacities of all experts in one tensor, as DeepSpeed has them: ``[*lead, n, H]`` for each."""
    hidden, w_in, w_out, bias = g.input(torch.randn(*lead, R, H)), g.experts(H, 2 * I), g.experts(H, I), g.experts(H)
    outs = []
    for expert, rows in enumerate(g.parts(g.method("chunk", hidden, E, len(lead)), E)):
        h = g.call(operator.matmul, rows, g.call(operator.getitem, w_in, expert))
        weights = [g.call(operator.getitem, parameter, expert) for parameter in (w_out, bias)]
        outs.append(g.call(torch.nn.functional.linear, between(h), *weights))
    return g.finish(g.call(torch.cat, outs, len(lead)))


@pytest.mark.parametrize("lead", [(1,), (1, 1), (2, 3)])
def test_rows_in_several_dimensions(lead: tuple[int, ...], g: GraphUnderTest) -> None:
    def gate(h: Node) -> Node:
        # A positive dimension, which must mean the same where rows are in one.
        a, b = g.parts(g.method("chunk", h, 2, len(lead) + 1), 2)
        return g.call(operator.mul, g.call(torch.softmax, a, -1), b)

    gm = chunks(g, gate, lead=lead)
    assert apply(group_expert_loops, g, gm).rewritten == 1
    assert targets(gm).count("grouped_mm.default") == 2
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def test_refuses_rows_in_several_dimensions_that_meet() -> None:
    def halves(g: GraphUnderTest, h: Node) -> Node:
        return g.parts(g.method("chunk", h, 2, -1), 2)[0]

    for between in (
        lambda g, h: g.call(torch.softmax, halves(g, h), 2),
        lambda g, h: g.call(torch.softmax, halves(g, h), 1),
        lambda g, h: g.call(operator.sub, halves(g, h), g.method("mean", halves(g, h), 0, True)),
        lambda g, h: g.method("squeeze", halves(g, h), 0),
        lambda g, h: g.method("view", halves(g, h), 2, R // E, -1),
        # Means another dimension where rows are in one.
        lambda g, h: g.method("sum", g.method("unflatten", h, -1, (2, I)), 2),
    ):
        g = GraphUnderTest()
        outcome = leaves_alone(group_expert_loops, g, chunks(g, partial(between, g), lead=(1, 2)))
        assert len(outcome.skipped) == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["layer_norm", "layer_norm, named", "rms_norm", "by hand", "scaled behind"])
def test_vectors_of_each_expert(kind: str, depth: int, g: GraphUnderTest) -> None:
    hidden, w, scale, shift = g.input(torch.randn(R, H)), g.experts(H, H), g.experts(H), g.experts(H)
    outs = []
    for expert in range(E):
        x = g.call(operator.getitem, hidden, slice(4 * expert, 4 * expert + 4))
        x = x if depth == 1 else g.method("unsqueeze", x, 0)
        matrix, a, b = (g.call(operator.getitem, parameter, expert) for parameter in (w, scale, shift))
        if kind == "layer_norm":
            x = g.call(torch.nn.functional.layer_norm, x, (H,), a, b, 1e-5)
        elif kind == "layer_norm, named":
            x = g.call(torch.nn.functional.layer_norm, x, (H,), bias=b, weight=a)
        elif kind == "rms_norm":
            x = g.call(operator.sub, g.call(torch.rms_norm, x, (H,), a, None), b)
        elif kind == "by hand":
            squares = g.method("mean", g.method("pow", x, 2), -1, True)
            x = g.call(operator.mul, x, g.call(torch.rsqrt, g.call(operator.add, squares, 1e-6)))
            x = g.call(operator.mul, g.call(operator.add, 1.0, a), x)
            x = g.call(operator.add, x, b)
        x = g.call(operator.matmul, x, matrix)
        if kind == "scaled behind":
            x = g.call(operator.truediv, g.call(operator.mul, x, a), b)
        outs.append(x)
    gm = g.finish(*outs)
    assert apply(group_expert_loops, g, gm).rewritten == 1
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def test_turns_that_differ_from_one_to_the_next_are_calls(g: GraphUnderTest) -> None:
    gm = loop(g, turns=2, in_place=False, odd=[(1, expert) for expert in range(E)])
    assert apply(group_expert_loops, g, gm).rewritten == 1
    assert targets(gm).count("grouped_mm.default") == 4


def test_refuses_a_call_that_begins_in_an_earlier_one(g: GraphUnderTest) -> None:
    """The first expert is used for the second time before the last one is for the first time."""
    hidden, w = g.input(torch.randn(R, H)), g.experts(H, H)
    first, second = ([g.call(operator.getitem, w, expert) for expert in range(E)] for _ in range(2))
    rows = [g.call(operator.getitem, hidden, g.input(torch.arange(3) + expert)) for expert in range(E)]
    once = [g.call(operator.matmul, x, view) for x, view in zip(rows[:-1], first[:-1], strict=True)]
    twice = [g.call(operator.matmul, g.call(operator.add, once[0], once[1]), second[0])]
    once.append(g.call(operator.matmul, rows[-1], first[-1]))
    for expert in range(1, E):
        twice.append(g.call(operator.matmul, g.call(operator.add, once[expert], once[expert - 1]), second[expert]))
    leaves_alone(group_expert_loops, g, g.finish(g.call(torch.cat, twice)))


def test_refuses_what_is_computed_of_parameters_and_no_rows(g: GraphUnderTest) -> None:
    """A shared matrix times an expert's has lines that are no rows of tokens."""
    hidden, w, bias, shared = g.input(torch.randn(R, H)), g.experts(H, H), g.experts(H), g.parameter(H, H)
    outs = []
    for expert in range(E):
        x = g.call(operator.getitem, hidden, slice(4 * expert, 4 * expert + 4))
        matrix = g.call(operator.matmul, shared, g.call(operator.getitem, w, expert))
        outs.append(g.call(operator.add, g.call(operator.matmul, x, matrix), g.call(operator.getitem, bias, expert)))
    outcome = leaves_alone(group_expert_loops, g, g.finish(*outs))
    assert "an expert's parameter and no rows" in outcome.skipped[0].reason


@pytest.mark.parametrize("kind", ["norm", "product"])
def test_refuses_vectors_of_parts_of_rows(kind: str, g: GraphUnderTest) -> None:
    hidden, w, scale = g.input(torch.randn(R, H)), g.experts(H, H), g.experts(H // 2)
    outs = []
    for expert in range(E):
        x = g.call(operator.getitem, hidden, slice(4 * expert, 4 * expert + 4))
        heads = g.method("view", g.call(operator.matmul, x, g.call(operator.getitem, w, expert)), -1, 2, H // 2)
        vector = g.call(operator.getitem, scale, expert)
        if kind == "norm":
            outs.append(g.call(torch.nn.functional.layer_norm, heads, (H // 2,), vector))
        else:
            outs.append(g.call(operator.mul, heads, vector))
    outcome = leaves_alone(group_expert_loops, g, g.finish(*outs))
    assert "rows in other dimensions" in outcome.skipped[0].reason


def test_refuses_a_turn_that_needs_an_earlier_one(g: GraphUnderTest) -> None:
    rows, weights = g.input(torch.randn(3, H)), g.experts(H, H)
    for expert in range(E):
        rows = g.call(operator.matmul, rows, g.call(operator.getitem, weights, expert))
    outcome = leaves_alone(group_expert_loops, g, g.finish(rows))
    assert "result of an earlier one" in outcome.skipped[0].reason


def test_refuses_to_move_a_change_past_a_reader(g: GraphUnderTest) -> None:
    state = g.method("clone", g.input(torch.randn(R, H)))
    weights = g.experts(H, H)
    for expert in range(E):
        part = slice(expert * R // E, (expert + 1) * R // E)
        # Reads the tensor that the previous turn changed, though FX sees no dependence.
        rows = g.method("clone", g.call(operator.getitem, state, part))
        h = g.call(operator.matmul, rows, g.call(operator.getitem, weights, expert))
        g.method("index_add_", state, 0, g.input(torch.arange(R)[part]), h)
    outcome = leaves_alone(group_expert_loops, g, g.finish(state))
    assert "changed in place" in outcome.skipped[0].reason


def test_refuses_rows_changed_in_place_and_grad_modes_and_other_forms() -> None:
    def loop_with(change: str) -> GraphModule:
        hidden, weights = g.input(torch.randn(R, H)), g.experts(*((2, H, H) if change == "inner index" else (H, H)))
        total = []
        for expert in range(E):
            rows = g.method("clone", g.call(operator.getitem, hidden, slice(expert * 4, expert * 4 + 4)))
            if change == "in place":
                g.method("mul_", rows, 2.0)
            if change == "no_grad":
                g.call(torch._C._set_grad_enabled, False)
            weight = g.call(operator.getitem, weights, expert)
            if change == "inner index":
                weight = g.call(operator.getitem, weight, 1)
            if change == "by name":
                weight = g.method("transpose", weight, dim0=0, dim1=1)
            if change == "matrix added":
                weight = g.call(operator.add, weight, g.input(torch.randn(H, H)))
            total.append(g.call(operator.matmul, rows, weight))
            if change == "no_grad":
                g.call(torch._C._set_grad_enabled, True)
        return g.finish(g.call(torch.cat, total))

    for change in ("in place", "no_grad", "inner index", "by name", "matrix added"):
        g = GraphUnderTest()
        assert len(leaves_alone(group_expert_loops, g, loop_with(change)).skipped) == 1, change


def test_results_changed_in_place(g: GraphUnderTest) -> None:
    """y *= weights, on a part that is then no view of the whole."""
    hidden, weights, total = g.input(torch.randn(R, H)), g.experts(H, H), []
    for expert in range(E):
        rows = g.call(operator.getitem, hidden, slice(expert * 4, expert * 4 + 4))
        y = g.call(operator.matmul, rows, g.call(operator.getitem, weights, expert))
        total.append(g.call(operator.imul, y, g.input(torch.rand(4, 1))))
    gm = g.finish(g.call(torch.cat, total))
    assert apply(group_expert_loops, g, gm).rewritten == 1


def test_leaves_other_uses_alone(g: GraphUnderTest) -> None:
    rows, _, offsets = g.routing()
    gm = g.finish(g.call(torch.ops.hecate.grouped_mm.default, rows, g.experts(H, I), offsets))
    assert leaves_alone(group_expert_loops, g, gm).skipped == ()


def test_two_experts_modules_in_one_loop_are_grouped_each(g: GraphUnderTest) -> None:
    """Gate and up projections in modules of their own: both loops stand behind the same last input."""
    hidden = g.input(torch.randn(R, H))
    gate = g.experts(H, I)
    g.layer = number_of(add_layer(name="up", owners=Owners.contiguous(E, 1), world=SINGLE))
    up, outs = g.experts(H, I), []
    parts = [g.call(operator.getitem, hidden, slice(e * R // E, (e + 1) * R // E)) for e in range(E)]
    for expert, rows in enumerate(parts):
        h = g.call(operator.matmul, rows, g.call(operator.getitem, gate, expert))
        other = g.call(operator.matmul, rows, g.call(operator.getitem, up, expert))
        outs.append(g.call(operator.mul, g.call(torch.nn.functional.silu, h), other))
    gm = g.finish(g.call(torch.cat, outs))
    assert apply(group_expert_loops, g, gm).rewritten == 2
    assert targets(gm).count("grouped_mm.default") == 2
