"""Sums over the rows of each token, and the way of a region's results to them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from hecate.passes.analysis.row_parts import (
    after_casts,
    cut_alike,
    inverts,
    joined,
    keeps_rows,
    only_user,
    parts_of,
    quotient_of,
    same_index,
)
from hecate.passes.analysis.torch_values import GraphFacts, mutates, storage_of, value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, calls, describe, is_getitem, operands
from hecate.passes.match import named


@dataclass(eq=False)
class Exit:
    """An exit on its way to the sums.

    Attributes:
        exit: the exit itself.
        entry: the rows in whose order it is.
        inside: the nodes that move into the region: multiplications, and casts before them, in order.
        factors: the routing weights that it is multiplied with.
        joined: pairs of a concatenation of all parts of a value, and that value.
    """

    exit: Node
    entry: Node
    inside: list[Node] = field(default_factory=list)
    factors: list[Node] = field(default_factory=list)
    joined: list[tuple[Node, Node]] = field(default_factory=list)

    def follow(self, facts: GraphFacts, tokens: Sequence[Node]) -> Node:
        """Walk to the sum over the rows of each token, and return its last node. Raises Refused."""
        rows = last_inside = self.exit
        casts: list[Node] = []
        while True:
            user = only_user(rows)
            parts = parts_of(user, rows)
            if keeps_rows(user):
                casts.append(user)
                rows = user
            elif (factor := _factor(user, rows)) is not None:
                for node in (last_inside, *casts):
                    # Even the length of rows that are now computed elsewhere cannot be asked here.
                    if len(node.users) != 1:
                        raise Refused(f"the length of {describe(node)} is used behind the experts", node)
                self.factors.append(factor)
                self.inside += [*casts, user]
                casts, rows = [], user
                last_inside = user
            elif parts is not None and (whole := joined(parts)) is not None:
                self.joined.append((whole, rows))
                rows = whole
            else:
                break
        last = self._sum(facts, rows, user, tokens)
        wholes = [whole for whole, _ in self.joined]
        facts.refuse_changes_of([*self.inside, *casts, *self.factors, *wholes], until=last)
        return last

    def _sum(self, facts: GraphFacts, rows: Node, user: Node, tokens: Sequence[Node]) -> Node:
        """Check that ``user`` sums a token's rows, and return the last node of the sum."""
        if (parts := parts_of(user, rows)) is not None:
            if not cut_alike(user, self.entry, parts):
                raise Refused(f"{describe(user)} cuts its results in other parts than its rows", user)
            return _added_in_turns(facts, [_added(after_casts(part)) for part in parts], tokens)
        added = _added(rows) if _is_sum_by_index(user) else None
        if added is not None:
            if not same_index((added[1],), tokens):
                raise Refused(f"{describe(user)} sums by another index than that of the tokens", user)
            return user
        # Rows are back in the order of the tokens: all choices of a token stand together.
        divided = quotient_of(tokens[0]) if len(tokens) == 1 else None
        if divided is None or not (is_getitem(user) and arg(user, 0) is rows and inverts(facts, user, divided[0])):
            raise Refused(f"its results go to {describe(user)}, which is no sum over the rows of a token", user)
        return _summed_by_choice(user, divided[1], value_of(self.exit))


def _factor(user: Node, rows: Node) -> Node | None:
    """Return the weight ``[R, 1]`` with which a multiplication scales each row."""
    if not (calls(user, operator.mul, torch.mul) or (user.op == "call_method" and user.target == "mul")):
        return None
    given = operands(user)
    others = [other for other in given if other is not rows]
    if len(given) != 2 or len(others) != 1 or not isinstance(others[0], Node):
        return None
    value = value_of(others[0])
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or not value.is_floating_point():
        return None
    # A single row would be one weight for all.
    return others[0] if str(value.shape[1]) == "1" and str(value.shape[0]) != "1" else None


def _summed_by_choice(rows: Node, choices: int, whole: Any) -> Node:
    """Check ``rows.view(T, k, H).sum(1)``, and return the sum."""
    view = only_user(after_casts(rows))
    value = value_of(view)
    if not named(view, "view", "reshape", "unflatten") or not isinstance(value, torch.Tensor):
        raise Refused(f"its results go to {describe(view)}, which is no sum over the rows of a token", view)
    width = whole.shape[1:] if isinstance(whole, torch.Tensor) else value_of(rows).shape[1:]
    if value.ndim != 3 or value.shape[1] != choices or value.shape[2:] != width:
        raise Refused(f"{describe(view)} does not put the {choices} rows of a token together", view)
    total = only_user(after_casts(view))
    dim = total.kwargs.get("dim", total.args[1] if len(total.args) > 1 else None)
    if not named(total, "sum") or dim not in (1, -2, (1,), [1], (-2,), [-2]):
        raise Refused(f"its results go to {describe(total)}, which is no sum over the rows of a token", total)
    return total


def _is_sum_by_index(node: Node) -> bool:
    return named(node, "index_add", "index_add_", "index_put", "index_put_")


def _added(rows: Node) -> tuple[Node, Node]:
    """Return the sum ``out.index_add(0, index, rows)`` or ``out.index_put((index,), rows, True)``, and its index."""
    node = only_user(rows)
    given = operands(node)
    if named(node, "index_put", "index_put_") and len(given) == 4 and given[3] is True:
        where = given[1]
        if given[2] is rows and given[0] is not rows and isinstance(where, (tuple, list)) and len(where) == 1:
            return node, where[0]
    if (
        not named(node, "index_add", "index_add_")
        or len(given) != 4
        or given[1] != 0
        or given[3] is not rows
        or given[0] is rows
    ):
        raise Refused(f"its results go to {describe(node)}, which is no sum over the rows of a token", node)
    return node, given[2]


def _added_in_turns(facts: GraphFacts, sums: Sequence[tuple[Node, Node]], tokens: Sequence[Node]) -> Node:
    """Check that parts are added to one tensor, which no node reads before the last, and return the last sum."""
    nodes = [node for node, _ in sums]
    if not same_index([index for _, index in sums], tokens):
        raise Refused(f"{describe(nodes[0])} sums by another index than that of the tokens")
    first, last = min(nodes), max(nodes)
    targets = [mutates(node) for node in nodes]
    if all(target is None for target in targets):
        # The form is out = out.index_add(...), turn by turn.
        for before, after in zip(sorted(nodes), sorted(nodes)[1:], strict=False):
            if set(before.users) != {after} or arg(after, 0) is not before:
                raise Refused(f"{describe(before)} is used before the rows of each token are summed", before)
        return last
    memory = {storage_of(target) for target in targets}
    if len(memory) != 1 or None in memory or None in targets:
        raise Refused("its results are summed in different tensors")
    node = first
    while node is not last:
        if node not in nodes and any(storage_of(source) in memory for source in node.all_input_nodes):
            raise Refused(f"{describe(node)} reads a sum before the rows of each token are in it", node)
        node = node.next
    return last
