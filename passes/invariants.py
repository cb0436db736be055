"""Invariants that graphs of this compiler must hold after every pass.

A captured graph (:func:`verify`):

1. The ticket of an exchange and of its way back (splits, send and receive index) comes from one ``route``; one by
   nodes (with a middle index) from one ``route_nodes``, which has the ticket of one ``route``.
2. A grouped matmul on slots (own experts, replicas) uses the offsets of a route (or ``count_rows`` at one
   rank), one on gathered experts never does.
3. Every route's result is used: rows that leave come back.

A forward or backward graph (:func:`verify_final`):

4. Every start of a collective has exactly one wait, of the same collective, behind it; every wait has its start.
5. As far as starts are tied to each other, they form one chain: each names the start right before it, and none is
   left out between.
6. The note of every start can be read, and names the collective that it is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.fx import arg, arguments_of, calls, is_getitem, operands, reached
from hecate.runtime.comm.collective import collective_of, start_of, wait_of
from hecate.runtime.comm.queue import Span
from hecate.runtime.ops.experts import own_experts
from hecate.runtime.ops.node_ticket import NODE_TICKET_PARTS
from hecate.runtime.ops.ticket import TICKET_PARTS


class InvalidGraphError(RuntimeError):
    """A pass broke an invariant: a bug in Hecate. Switch the pass off by name and report it."""


# --- captured graphs ---


def verify(gm: GraphModule) -> None:
    """Lint a captured graph and check invariants 1 to 3. Raises InvalidGraphError, which names the node."""
    gm.graph.lint()
    backs: set[Node] = set()
    for node in gm.graph.nodes:
        collective = collective_of(node.target) if node.op == "call_function" else None
        if collective is not None and collective.carries == "rows":
            route = _node_route_of(node) if collective.hops == 2 else _route_of(node, node.args[1:4])
            if collective.homeward:
                backs.add(route)
        elif calls(node, torch.ops.hecate.grouped_mm, torch.ops.hecate.grouped_mm_pair):
            _check_offsets(node)
    for node in gm.graph.nodes:
        if calls(node, torch.ops.hecate.route) and node not in backs:
            raise InvalidGraphError(f"hecate: rows routed by {node.name} never come back")


def _route_of(node: Node, ticket: Sequence[Any]) -> Node:
    """Return the route of the splits, the send and the receive index of an exchange."""
    of_route = all(is_getitem(part) and calls(arg(part, 0), torch.ops.hecate.route) for part in ticket)
    if not of_route or [arg(part, 1) % TICKET_PARTS for part in ticket] != [1, 2, 3]:
        raise InvalidGraphError(f"hecate: {node.name} holds no ticket of a route: {ticket}")
    route: Node = arg(ticket[0], 0)
    if any(arg(part, 0) is not route for part in ticket) or route.args[-1] != node.args[-1]:
        raise InvalidGraphError(f"hecate: {node.name} mixes tickets of different routes or layers")
    if len({arg(part, 1) // TICKET_PARTS for part in ticket}) != 1:
        raise InvalidGraphError(f"hecate: {node.name} mixes tickets of different chunks")
    return route


def _node_route_of(node: Node) -> Node:
    """Return the route of the ticket of an exchange by nodes."""
    ticket: Any = node.args[1 : 1 + NODE_TICKET_PARTS]
    for index, part in enumerate(ticket):
        by_node = is_getitem(part) and calls(arg(part, 0), torch.ops.hecate.route_nodes)
        if not by_node or arg(part, 1) != index or arg(part, 0) is not arg(ticket[0], 0):
            raise InvalidGraphError(f"hecate: {node.name} holds no ticket of a route by nodes: {part}")
    made = arg(ticket[0], 0)
    if made.args[-1] != node.args[-1]:
        raise InvalidGraphError(f"hecate: {node.name} mixes tickets of different layers")
    return _route_of(made, made.args[3:6])


def _check_offsets(node: Node) -> None:
    matrices = 2 if calls(node, torch.ops.hecate.grouped_mm_pair) else 1
    _, *weights, offsets = operands(node)[: 2 + matrices]
    own = all(map(_comes_from_slots, weights))
    routed = calls(offsets, torch.ops.hecate.count_rows) or (
        is_getitem(offsets) and calls(arg(offsets, 0), torch.ops.hecate.route)
    )
    if own != routed:
        what = "slots with unrouted" if own else "gathered experts with routed"
        raise InvalidGraphError(f"hecate: {node.name} uses {what} offsets {offsets}")


def _comes_from_slots(weight: Node) -> bool:
    """Tell whether a weight is made from own experts and replicas, with no gather of parameters between."""
    made_of = reached([weight], lambda node: [] if collective_of(node.target) else node.all_input_nodes)
    return any(
        calls(node, own_experts) or ((one := collective_of(node.target)) is not None and one.carries == "replicas")
        for node in {weight, *made_of}
    )


# --- forward and backward graphs ---


def verify_final(gm: GraphModule) -> None:
    """Lint a forward or backward graph and check invariants 4 to 6. Raises InvalidGraphError, naming the node."""
    gm.graph.lint()
    starts, waited = [], set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if start_of(node.target) is not None:
            starts.append(node)
        elif wait_of(node.target) is not None:
            waited.add(_start_behind(node))
    for start in starts:
        if start not in waited:
            raise InvalidGraphError(f"hecate: nothing waits for {start.name}")
        _check_note(start)
    _check_chain(starts)


def _start_behind(wait: Node) -> Node:
    """Return the start of a wait."""
    token = wait.args[0]
    collective = wait_of(wait.target)
    if not isinstance(token, Node) or token.op != "call_function" or start_of(token.target) is None:
        raise InvalidGraphError(f"hecate: {wait.name} waits for nothing that was started: {token}")
    if start_of(token.target) is not collective:
        raise InvalidGraphError(f"hecate: {wait.name} waits for a collective of another kind, {token.name}")
    others = [user.name for user in token.users if user is not wait and wait_of(user.target) is not None]
    if others:
        raise InvalidGraphError(f"hecate: {token.name} is waited for twice, by {wait.name} and {others[0]}")
    return token


def _check_chain(starts: list[Node]) -> None:
    """Check that no start names another, or, after ``order_collectives``, that each names the one before it."""
    named: list[Any] = [arguments_of(start)["after"] for start in starts]
    if not any(named):
        return
    for before, start, after in zip([None, *starts], starts, named, strict=False):
        wanted = [before] if before is not None else []
        if list(after) != wanted:
            raise InvalidGraphError(
                f"hecate: {start.name} starts after {list(after)}, and not after {wanted}: there is no one order"
            )


def _check_note(start: Node) -> None:
    collective, text = collective_of(start.target), arguments_of(start)["note"]
    try:
        note = Span.of(text)
    except ValueError as error:
        raise InvalidGraphError(f"hecate: the note of {start.name} cannot be read: {error}") from None
    if collective is None or note.operator != collective.name:
        raise InvalidGraphError(f"hecate: the note of {start.name} is one of {note.operator}: {text!r}")
