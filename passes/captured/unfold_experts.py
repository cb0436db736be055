"""unfold_experts: experts that are kept one under the other are read expert by expert.

Needs    gather_experts nodes, ``[E, a, b]``, of which code reads views: a parameter ``[E * a, b]`` is read as one.
Changes  w = g.view(-1, b), and then   w.view(E, a, b)   becomes   g
                                       w.chunk(E)[e]     becomes   g[e]
                                       w[e * a:e * a + a]   becomes   g[e]
                                       w.view(E, a, b).chunk(E)[e].squeeze(0)   becomes   g[e]
Never    touches other uses of the matrix: they read it as the model has it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts, shape_of, value_of
from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import arg, calls, copy_place, erase_unused, is_getitem, option, take_place
from hecate.passes.match import named

_VIEWS = ("view", "reshape", "unflatten", "flatten", "squeeze")


def unfold_experts(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite what reads all experts of a matrix, and what reads one."""
    gathers = [node for node in gm.graph.nodes if calls(node, torch.ops.hecate.gather_experts)]
    modes, rewritten = GraphFacts(gm.graph).grad_modes, 0
    for gather in gathers:
        # A view under no_grad carries no gradient.
        views = [(node, expert) for node, expert in _views(gather) if modes[node] == modes[gather]]
        for node, expert in views:
            if expert is None and shape_of(node) == shape_of(gather):
                take_place(node, gather)
                rewritten += 1
            elif expert is not None and shape_of(node) == shape_of(gather)[1:]:
                with gm.graph.inserting_before(node):
                    one = gm.graph.call_function(operator.getitem, (gather, expert))
                copy_place(node, one)
                take_place(node, one)
                rewritten += 1
        erase_unused(user for node, _ in views for user in (node, *node.all_input_nodes) if user is not gather)
    return Outcome(rewritten=rewritten)


def _views(gather: Node) -> Iterator[tuple[Node, int | None]]:
    """Yield what has the values of a gather in their order: those of all experts, or with its number those of one."""
    num_experts, dtype = shape_of(gather)[0], value_of(gather).dtype
    waiting: list[tuple[Node, int | None]] = [(gather, None)]
    while waiting:
        source, expert = waiting.pop()
        for user in source.users:
            if user.args[:1] != (source,) or getattr(value_of(user), "dtype", dtype) != dtype:
                continue
            only = expert is not None and is_getitem(user) and user.args[1] == 0 and shape_of(source)[0] == 1
            if named(user, *_VIEWS) or only:
                waiting.append((user, expert))
            elif expert is None and _is_cut(user, num_experts):
                waiting += [(piece, int(arg(piece, 1))) for piece in user.users if is_getitem(piece)]
            elif expert is None and is_getitem(user) and source is not gather:
                waiting += [(user, one) for one in _expert_in(user.args[1], shape_of(source)[0], num_experts)]
        if source is not gather:
            yield source, expert


def _expert_in(rows: object, length: int, num_experts: int) -> Iterator[int]:
    """Yield the expert whose rows a slice of all rows takes, if they are those of one."""
    ends = (rows.start, rows.stop, rows.step) if isinstance(rows, slice) else (object(),)
    if length % num_experts == 0 and all(end is None or type(end) is int for end in ends):
        assert isinstance(rows, slice)
        (start, stop, step), own = rows.indices(length), length // num_experts
        if step == 1 and start % own == 0 and stop - start == own:
            yield start // own


def _is_cut(node: Node, num_experts: int) -> bool:
    """Return whether a node cuts a tensor into a piece for each expert."""
    pieces = value_of(node)
    if not named(node, "chunk", "split", "unbind", "tensor_split") or not isinstance(pieces, (tuple, list)):
        return False
    dim = option(node, 1 if named(node, "unbind") else 2, "dim", 0)
    return dim == 0 and len(pieces) == num_experts and len({piece.shape for piece in pieces}) == 1
