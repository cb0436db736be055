"""The specification of graphs: a planted violation of each rule is caught by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes import FINAL_PASSES, PassContext
from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.final.collective_notes import notes_in
from hecate.passes.final.split_collectives import split_collectives
from hecate.passes.fx import arguments_of, calls
from hecate.passes.invariants import InvalidGraphError, verify, verify_final
from hecate.passes.runner import run_passes
from hecate.runtime.comm.collective import collective_named, start_of, wait_of
from hecate.runtime.comm.queue import Span
from tests.support.graphs import GraphUnderTest, H, apply
from tests.support.graphs import two_layers as traced


def final_graph(*, ordered: bool = True) -> GraphModule:
    """Two MoE layers after the passes on forward graphs."""
    gm, _ = traced()
    passes = FINAL_PASSES if ordered else (split_collectives,)
    run_passes(gm, PassContext(world_size=2), passes=passes, check=verify_final)
    return gm


def starts(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if start_of(node.target) is not None]


def waits(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if wait_of(node.target) is not None]


def change(node: Node, **arguments: object) -> None:
    node.args = tuple({**arguments_of(node), **arguments}.values())


def wait_twice(gm: GraphModule) -> str:
    wait = waits(gm)[1]
    with gm.graph.inserting_after(wait):
        gm.graph.node_copy(wait)
    return f"{wait.args[0]} is waited for twice"


def never_wait(gm: GraphModule) -> str:
    # The last one: nothing behind it needs what it would give.
    wait = next(wait for wait in reversed(waits(gm)) if wait_of(wait.target).name == "sparse_all_gather")
    token = wait.args[0]
    for user in list(wait.users):
        with gm.graph.inserting_before(user):
            user.replace_all_uses_with(gm.graph.call_function(torch.zeros, (1,)))
        gm.graph.erase_node(user)
    gm.graph.erase_node(wait)
    return f"nothing waits for {token}"


def wait_for_another_kind(gm: GraphModule) -> str:
    wait = next(wait for wait in waits(gm) if wait_of(wait.target).name == "exchange")
    wait.target = collective_named("exchange_back").wait
    return f"{wait.name} waits for a collective of another kind, {wait.args[0]}"


def wait_for_nothing(gm: GraphModule) -> str:
    wait = waits(gm)[0]
    with gm.graph.inserting_before(wait):
        token = gm.graph.call_function(torch.zeros, (1,))
    wait.args = (token, *wait.args[1:])
    return f"{wait.name} waits for nothing that was started"


def break_the_chain(gm: GraphModule) -> str:
    third = starts(gm)[2]
    change(third, after=[])
    return f"{third.name} starts after \\[\\]"


def leave_one_out(gm: GraphModule) -> str:
    first, _, third, *_ = starts(gm)
    change(third, after=[first])
    return f"{third.name} starts after \\[{first.name}\\]"


def spoil_a_note(gm: GraphModule) -> str:
    start = starts(gm)[0]
    change(start, note="forward something")
    return f"the note of {start.name} cannot be read"


def swap_a_note(gm: GraphModule) -> str:
    first, second, *_ = starts(gm)
    change(first, note=arguments_of(second)["note"])
    return f"the note of {first.name} is one of {start_of(second.target).name}"


@pytest.mark.parametrize(
    "plant",
    [
        wait_twice,
        never_wait,
        wait_for_another_kind,
        wait_for_nothing,
        break_the_chain,
        leave_one_out,
        spoil_a_note,
        swap_a_note,
    ],
    ids=lambda function: function.__name__,
)
def test_a_planted_violation_in_a_final_graph_is_named(plant: Callable[[GraphModule], str]) -> None:
    gm = final_graph()
    verify_final(gm)
    said = plant(gm)
    with pytest.raises(InvalidGraphError, match=said):
        verify_final(gm)


def test_before_the_order_is_pinned_no_start_names_another() -> None:
    gm = final_graph(ordered=False)
    assert not any(arguments_of(start)["after"] for start in starts(gm))
    change(starts(gm)[2], after=[starts(gm)[0]])
    with pytest.raises(InvalidGraphError, match="there is no one order"):
        verify_final(gm)


def test_every_note_can_be_read_back() -> None:
    found = notes_in(final_graph().graph.nodes)
    assert [note.operator for note in found if note.subject.startswith("layer")]
    with pytest.raises(ValueError):
        Span.of("forward exchange soon 1.0 64 a layer")


def exchanged() -> GraphModule:
    """A captured region after the passes, at two ranks."""
    g = GraphUnderTest()
    rows, _, offsets = g.routing()
    gm = g.finish(g.call(torch.ops.hecate.grouped_mm, rows, g.experts(H, H), offsets))
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1
    return gm


def test_planted_violations_in_a_captured_graph_are_named() -> None:
    gm = exchanged()
    verify(gm)
    (back,) = (node for node in gm.graph.nodes if node.target is torch.ops.hecate.exchange_back.default)
    ticket, layer = back.args[1:4], back.args[-1]
    back.args = (back.args[0], ticket[1], ticket[0], *back.args[3:])
    with pytest.raises(InvalidGraphError, match=f"{back.name} holds no ticket of a route"):
        verify(gm)
    back.args = (back.args[0], *ticket, back.args[4], layer + 1)
    with pytest.raises(InvalidGraphError, match=f"{back.name} mixes tickets of different routes or layers"):
        verify(gm)
    back.args = (back.args[0], *ticket, back.args[4], layer)
    (first, *_) = (node for node in gm.graph.nodes if calls(node, torch.ops.hecate.grouped_mm))
    (counts,) = (node for node in gm.graph.nodes if node.target is torch.ops.hecate.gather_counts.default)
    first.args = (*first.args[:2], counts.args[0])
    with pytest.raises(InvalidGraphError, match=f"{first.name} uses slots with unrouted offsets"):
        verify(gm)
