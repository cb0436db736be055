"""What a graph of this compiler must look like after every pass.

1. The ticket of an exchange and of its way back (splits, send and receive index) comes from one ``route``.
2. A grouped matmul on slots (own experts, replicas) uses the offsets of a ``route`` (or ``count_rows`` at one
   rank), one on gathered experts never does.
3. Every route's result is used: rows that leave come back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.fx import ancestors, arg, calls, is_getitem, operands
from hecate.runtime.ops import own_experts


class InvalidGraphError(RuntimeError):
    """A pass broke an invariant: a bug in Hecate. Switch the pass off by name and report it."""


def verify(gm: GraphModule) -> None:
    """Lint the graph and check the invariants above.

    Raises:
        InvalidGraphError: names the node.
    """
    gm.graph.lint()
    backs: set[Node] = set()
    for node in gm.graph.nodes:
        if calls(node, torch.ops.hecate.exchange):
            _route_of(node, node.args[1:4])
        elif calls(node, torch.ops.hecate.exchange_back):
            backs.add(_route_of(node, node.args[1:4]))
        elif calls(node, torch.ops.hecate.grouped_mm):
            _check_offsets(node)
    for node in gm.graph.nodes:
        if calls(node, torch.ops.hecate.route) and node not in backs:
            raise InvalidGraphError(f"hecate: rows routed by {node.name} never come back")


def _route_of(node: Node, ticket: Iterable[Any]) -> Node:
    routes = []
    for index, part in enumerate(ticket, start=1):
        if not (is_getitem(part) and arg(part, 1) == index and calls(arg(part, 0), torch.ops.hecate.route)):
            raise InvalidGraphError(f"hecate: {node.name} holds no ticket of a route: {part}")
        routes.append(arg(part, 0))
    if len(set(routes)) != 1 or routes[0].args[-1] != node.args[-1]:
        raise InvalidGraphError(f"hecate: {node.name} mixes tickets of different routes or layers")
    return routes[0]


def _check_offsets(node: Node) -> None:
    hecate = torch.ops.hecate
    _, weight, offsets = operands(node)
    sources = ancestors([weight]) | {weight}
    own = any(calls(n, own_experts, hecate.sparse_all_gather, hecate.top_up) for n in sources)
    routed = calls(offsets, torch.ops.hecate.count_rows) or (
        is_getitem(offsets) and calls(arg(offsets, 0), torch.ops.hecate.route)
    )
    if own != routed:
        what = "slots with unrouted" if own else "gathered experts with routed"
        raise InvalidGraphError(f"hecate: {node.name} uses {what} offsets {offsets}")
