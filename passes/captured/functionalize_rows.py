"""functionalize_rows: in-place operations on the result of an expert matmul become plain ones.

Needs    calls that read gathered experts and return memory of their own: products, sums with a bias.
Changes  out.add_(b); f(out)   becomes   new = out.add(b); f(new)
Never    touches a tensor that somebody took a view of before: the view would miss the change.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import (
    PLAIN_FORM,
    GraphFacts,
    gathers_by_layer,
    mutates,
    storage_of,
    value_of,
)
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import computed_from, describe, is_getitem, skip_of

_PLAIN: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = {"add_", "sub_", "mul_", "div_", "clamp_", "neg_", "exp_", "tanh_", "sigmoid_", "relu_", "square_", "pow_"}


def functionalize_rows(gm: GraphModule, context: PassContext) -> Outcome:
    """Follow each matmul result through the in-place operations on it."""
    rewritten, skipped = 0, []
    modes = GraphFacts(gm.graph).grad_modes
    for node in _results(gm):
        current = node
        while True:
            changes = sorted(u for u in current.users if mutates(u) is current)
            if not changes:
                break
            change = changes[0]
            early = [u for u in current.users if u is not change and u < change]
            plain = _plain_target(change) if modes[change] == modes[node] else None
            if early or plain is None:
                why = f"{describe(early[0])} read it before" if early else "no plain form is known here"
                refused = Refused(f"in-place {describe(change)} on expert rows: {why}", change, fix=PLAIN_FORM)
                skipped.append(skip_of(str(node), refused, fallback=False))
                break
            current = _replace(gm, current, change, plain)
            rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _results(gm: GraphModule) -> list[Node]:
    """Return the nodes that compute with gathered experts and other values, and are no views of either."""
    views = computed_from(gather for gathers in gathers_by_layer(gm.graph).values() for gather in gathers)
    # What is looked up for every row is of experts, too.
    views |= {user for view in views for user in view.users if is_getitem(user)}
    users = sorted({user for view in views for user in view.users if user not in views and mutates(user) is None})
    return [node for node in users if storage_of(node) not in {None, *map(storage_of, node.all_input_nodes)}]


def _plain_target(change: Node) -> Any:
    if change.op == "call_method" and change.target in _METHODS:
        return str(change.target)[:-1]
    return _PLAIN.get(change.target) if change.op == "call_function" else None


def _replace(gm: GraphModule, current: Node, change: Node, plain: Any) -> Node:
    with gm.graph.inserting_before(change):
        new = gm.graph.create_node(change.op, plain, change.args, dict(change.kwargs))
        kept = {change, new}
        values = [value_of(operand) for operand in (current, *change.all_input_nodes)]
        if len({value.dtype for value in values if isinstance(value, torch.Tensor) and value.ndim}) > 1:
            # An in-place operation keeps the dtype of its target, a plain one promotes.
            new.meta = dict(change.meta)
            new = gm.graph.call_method("type_as", (new, current))
            kept.add(new)
        new.meta = dict(change.meta)
    current.replace_all_uses_with(new, delete_user_cb=lambda user: user not in kept)
    change.replace_all_uses_with(new)
    gm.graph.erase_node(change)
    return new
