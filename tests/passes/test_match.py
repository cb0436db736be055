"""Patterns of calls, and what counts as a cast."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, Node

from hecate.passes.match import LINE, ORDER, RANGE, call, casts, is_cast, match, named, one_of, shaped, uncast


@pytest.fixture
def x() -> Node:
    return Graph().placeholder("x")


def test_names_stand_for_one_thing(x: Node) -> None:
    twice = x.graph.call_function(torch.add, (x, x))
    other = x.graph.call_function(torch.add, (x, twice))
    pattern = call("add", "a", "a")
    assert match(pattern, twice) == {"a": x} and match(pattern, other) is None
    assert match(call("add", "a"), other) == {"a": x} and match(call("add", "a", only=True), other) is None
    assert match(call("a", names=("sub", "add"), bind="sum"), twice) == {"a": x, "sum": twice}


def test_what_a_pattern_that_fails_has_found_is_forgotten(x: Node) -> None:
    node = x.graph.call_function(torch.add, (x, 1))
    assert match(one_of(call("add", "wrong", 2), call("add", "right", 1)), node) == {"right": x}
    assert match(call("add", "a", True), node) is None, "1 is not True"


def test_casts_that_round_are_no_casts_of_numbers(x: Node) -> None:
    exact = x.graph.call_method("contiguous", (x.graph.call_method("long", (x,)),))
    rounded = x.graph.call_method("half", (x,))
    unknown = x.graph.call_method("to", (x, torch.bfloat16))
    unknown.meta["example_value"] = torch.zeros(2, dtype=torch.bfloat16, device="cpu")
    assert all(map(is_cast, (exact, rounded, unknown))) and not is_cast(x)
    assert uncast(exact) is x and uncast(rounded) is rounded and uncast(unknown) is unknown
    assert match(casts("n"), exact) == {"n": x}


def test_ranges_and_orders(x: Node) -> None:
    graph = x.graph
    lines = [graph.call_function(torch.arange, args) for args in ((4,), (0, 4), (1, 4), (0, 4, 2))]
    assert [match(LINE, line) is not None for line in lines] == [True, True, False, False]
    column = graph.call_method("unsqueeze", (graph.call_method("to", (lines[0], torch.int32)), 1))
    assert match(RANGE, column) is not None and match(LINE, column) is None
    assert match(shaped("n"), column) == {"n": lines[0]}
    ordered = graph.call_method("sort", (x,))
    values, places = (graph.call_function(operator.getitem, (ordered, index)) for index in (0, 1))
    assert match(ORDER, places) == {"values": x, "sort": ordered} and match(ORDER, values) is None
    assert named(values, "getitem") and not named(x, "x")
