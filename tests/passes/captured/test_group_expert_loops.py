from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import GraphModule

from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.group_expert_loops import group_expert_loops
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.placement.owners import Owners
from tests.support.graphs import E, GraphUnderTest, H, I, R, apply, number_of, targets
from tests.support.layers import add_layer


def loop(
    g: GraphUnderTest, *, odd: int | None = None, across: bool = False, missing: int | None = None
) -> GraphModule:
    """One turn per expert on a quarter of the rows, in place into a common output."""
    hidden = g.input(torch.randn(R, H))
    w_in, w_out, bias = g.experts(H, I), g.experts(H, I), g.experts(H)
    out = g.call(torch.zeros_like, hidden)
    for expert in range(E):
        if expert == missing:
            continue
        part = slice(expert * R // E, (expert + 1) * R // E)
        rows = g.call(operator.getitem, hidden, part)
        h = g.call(operator.matmul, rows, g.call(operator.getitem, w_in, expert))
        h = g.call(torch.relu if expert == odd else torch.nn.functional.silu, h)
        if across:
            h = g.call(operator.sub, h, g.method("mean", h, 0, True))
        second = g.method("t", g.call(operator.getitem, w_out, expert))
        h = g.call(operator.matmul, h, second)
        h = g.call(operator.add, h, g.call(operator.getitem, bias, expert))
        index = g.input(torch.arange(R)[part])
        g.method("index_add_", out, 0, index, h)
    return g.finish(out)


def test_rewrites_a_loop_and_then_exchanges_it() -> None:
    g = GraphUnderTest()
    gm = loop(g)
    assert apply(group_expert_loops, g, gm).rewritten == 1
    names = targets(gm)
    assert names.count("grouped_mm.default") == 2
    assert names.count("matmul") == 0
    assert names.count("index_add_") == E
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def test_refuses_turns_that_differ_or_are_missing_or_mix_rows() -> None:
    for options, reason in (
        ({"odd": 2}, "another way"),
        ({"missing": 1}, "never used"),
        ({"across": True}, "keep rows apart"),
    ):
        g = GraphUnderTest()
        gm = loop(g, **options)
        before = targets(gm)
        outcome = apply(group_expert_loops, g, gm)
        assert outcome.rewritten == 0
        assert reason in outcome.skipped[0].reason
        assert targets(gm) == before


def choices(g: GraphUnderTest, *, once: int | None = None, odd: bool = False) -> GraphModule:
    """A loop over choices around one over experts: each expert has two turns."""
    hidden, w_in, w_out, bias = g.input(torch.randn(R, H)), g.experts(H, I), g.experts(I, H), g.experts(H)
    out = g.call(torch.zeros_like, hidden)
    for choice in range(2):
        for expert in range(E):
            if choice == 1 and expert == once:
                continue
            # 1, 2, 3, 4 rows, then 4, 3, 2, 1.
            index = g.input(torch.arange(expert + 1 if choice == 0 else E - expert))
            rows = g.call(operator.getitem, hidden, index)
            h = g.call(operator.matmul, rows, g.call(operator.getitem, w_in, expert))
            h = g.call(torch.relu if odd and choice else torch.nn.functional.silu, h)
            h = g.call(operator.matmul, h, g.call(operator.getitem, w_out, expert))
            h = g.call(operator.add, h, g.call(operator.getitem, bias, expert))
            out = g.call(torch.index_add, out, 0, index, h)
    return g.finish(out)


def test_several_turns_of_each_expert() -> None:
    g = GraphUnderTest()
    gm = choices(g)
    assert apply(group_expert_loops, g, gm).rewritten == 1
    names = targets(gm)
    assert names.count("grouped_mm.default") == 2 and names.count("index_add") == 2 * E
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def called_twice(g: GraphUnderTest, *, repeats: int, in_place: bool) -> GraphModule:
    """The layer on its own combined results, with as many turns of each expert in each call."""
    hidden, w_in, w_out = g.input(torch.randn(R, H)), g.experts(H, I), g.experts(I, H)
    for _ in range(2):
        out = g.call(torch.zeros_like, hidden)
        for again in range(repeats):
            for expert in range(E):
                index = g.input(torch.arange(expert + 1 if again == 0 else E - expert))
                h = g.call(
                    operator.matmul, g.call(operator.getitem, hidden, index), g.call(operator.getitem, w_in, expert)
                )
                h = g.call(torch.nn.functional.silu, h)
                h = g.call(operator.matmul, h, g.call(operator.getitem, w_out, expert))
                if in_place:
                    g.method("index_add_", out, 0, index, h)
                else:
                    out = g.call(torch.index_add, out, 0, index, h)
        hidden = g.call(operator.add, hidden, g.call(torch.tanh, out))
    return g.finish(hidden)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("repeats", [1, 2])
def test_a_layer_that_is_called_twice(repeats: int, in_place: bool) -> None:
    g = GraphUnderTest()
    gm = called_twice(g, repeats=repeats, in_place=in_place)
    outcome = apply(group_expert_loops, g, gm)
    assert (outcome.rewritten, outcome.skipped) == (1, ())
    names = targets(gm)
    assert names.count("grouped_mm.default") == 4 and names.count("matmul") == 0
    assert names.count("sizes_to_offsets.default") == 2
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1
    assert targets(gm).count("route.default") == 2 and targets(gm).count("place.default") == 1


def test_refuses_a_call_that_begins_in_an_earlier_one() -> None:
    """The first expert is used for the second time before the last one is for the first time."""
    g = GraphUnderTest()
    hidden, w = g.input(torch.randn(R, H)), g.experts(H, H)
    first, second = ([g.call(operator.getitem, w, expert) for expert in range(E)] for _ in range(2))
    rows = [g.call(operator.getitem, hidden, g.input(torch.arange(3) + expert)) for expert in range(E)]
    once = [g.call(operator.matmul, x, view) for x, view in zip(rows[:-1], first[:-1], strict=True)]
    twice = [g.call(operator.matmul, g.call(operator.add, once[0], once[1]), second[0])]
    once.append(g.call(operator.matmul, rows[-1], first[-1]))
    for expert in range(1, E):
        twice.append(g.call(operator.matmul, g.call(operator.add, once[expert], once[expert - 1]), second[expert]))
    gm = g.finish(g.call(torch.cat, twice))
    before = targets(gm)
    assert apply(group_expert_loops, g, gm).rewritten == 0
    assert targets(gm) == before


def test_refuses_turns_that_not_every_expert_has() -> None:
    g = GraphUnderTest()
    outcome = apply(group_expert_loops, g, choices(g, once=2))
    assert outcome.rewritten == 0 and "expert 2 has 1 turns, expert 0 has 2" in outcome.skipped[0].reason


def test_turns_that_differ_from_choice_to_choice_are_calls() -> None:
    g = GraphUnderTest()
    gm = choices(g, odd=True)
    assert apply(group_expert_loops, g, gm).rewritten == 1
    assert targets(gm).count("grouped_mm.default") == 4


def test_refuses_a_turn_that_needs_an_earlier_one() -> None:
    g = GraphUnderTest()
    rows, weights = g.input(torch.randn(3, H)), g.experts(H, H)
    for expert in range(E):
        rows = g.call(operator.matmul, rows, g.call(operator.getitem, weights, expert))
    outcome = apply(group_expert_loops, g, g.finish(rows))
    assert outcome.rewritten == 0
    assert "result of an earlier one" in outcome.skipped[0].reason


def test_refuses_to_move_a_change_past_a_reader() -> None:
    g = GraphUnderTest()
    state = g.method("clone", g.input(torch.randn(R, H)))
    weights = g.experts(H, H)
    for expert in range(E):
        part = slice(expert * R // E, (expert + 1) * R // E)
        # Reads the tensor that the previous turn changed, though FX sees no dependence.
        rows = g.method("clone", g.call(operator.getitem, state, part))
        h = g.call(operator.matmul, rows, g.call(operator.getitem, weights, expert))
        g.method("index_add_", state, 0, g.input(torch.arange(R)[part]), h)
    outcome = apply(group_expert_loops, g, g.finish(state))
    assert outcome.rewritten == 0
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
        outcome = apply(group_expert_loops, g, loop_with(change))
        assert (outcome.rewritten, len(outcome.skipped)) == (0, 1), change


def test_results_changed_in_place() -> None:
    """y *= weights, on a part that is then no view of the whole."""
    g = GraphUnderTest()
    hidden, weights, total = g.input(torch.randn(R, H)), g.experts(H, H), []
    for expert in range(E):
        rows = g.call(operator.getitem, hidden, slice(expert * 4, expert * 4 + 4))
        y = g.call(operator.matmul, rows, g.call(operator.getitem, weights, expert))
        total.append(g.call(operator.imul, y, g.input(torch.rand(4, 1))))
    gm = g.finish(g.call(torch.cat, total))
    assert apply(group_expert_loops, g, gm).rewritten == 1


def test_leaves_other_uses_alone() -> None:
    g = GraphUnderTest()
    rows, _, offsets = g.routing()
    gm = g.finish(g.call(torch.ops.hecate.grouped_mm.default, rows, g.experts(H, I), offsets))
    outcome = apply(group_expert_loops, g, gm)
    assert outcome.rewritten == 0 and outcome.skipped == ()


def test_two_experts_modules_in_one_loop_are_grouped_each() -> None:
    """Gate and up projections in modules of their own: both loops stand behind the same last input."""
    g = GraphUnderTest()
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
