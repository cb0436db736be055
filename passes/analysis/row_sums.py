"""Sums over the rows of each token, and the way of a region's results to them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from hecate.passes.analysis.torch_values import GraphFacts, mutates, storage_of, value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, calls, describe, is_getitem, operands, option
from hecate.passes.match import LINE, ORDER, is_cast, match, name_of, named
from hecate.private import is_erased


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
            elif (factor := weights_of(user, rows)) is not None:
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
            return _added_in_turns([_added(after_casts(part)) for part in parts], tokens)
        if named(user, "index_add", "index_add_", "index_put", "index_put_"):
            if not same_index((_added(rows)[1],), tokens):
                raise Refused(f"{describe(user)} sums by another index than that of the tokens", user)
            return user
        # Rows are back in the order of the tokens: all choices of a token stand together.
        divided = quotient_of(tokens[0]) if len(tokens) == 1 else None
        if divided is None or not (is_getitem(user) and arg(user, 0) is rows and inverts(facts, user, divided[0])):
            raise _no_sum(user)
        return _summed_by_choice(user, divided[1], value_of(self.exit))


def _no_sum(node: Node) -> Refused:
    return Refused(f"its results go to {describe(node)}, which is no sum over the rows of a token", node)


def _summed_by_choice(rows: Node, choices: int, whole: Any) -> Node:
    """Check ``rows.view(T, k, H).sum(1)``, and return the sum."""
    view = only_user(after_casts(rows))
    value = value_of(view)
    if not named(view, "view", "reshape", "unflatten") or not isinstance(value, torch.Tensor):
        raise _no_sum(view)
    width = whole.shape[1:] if isinstance(whole, torch.Tensor) else value_of(rows).shape[1:]
    if value.ndim != 3 or value.shape[1] != choices or value.shape[2:] != width:
        raise Refused(f"{describe(view)} does not put the {choices} rows of a token together", view)
    total = only_user(after_casts(view))
    if not named(total, "sum") or option(total, 1, "dim") not in (1, -2, (1,), [1], (-2,), [-2]):
        raise _no_sum(total)
    return total


def _added(rows: Node) -> tuple[Node, Node]:
    """Return the sum ``out.index_add(0, index, rows)`` or ``out.index_put((index,), rows, True)``, and its index."""
    node = only_user(rows)
    match (name_of(node).rstrip("_"), *operands(node)):
        case ("index_put", out, [index], added, True) if added is rows and out is not rows:
            return node, index
        case ("index_add", out, 0, index, added) if added is rows and out is not rows:
            return node, index
        case _:
            raise _no_sum(node)


def _added_in_turns(sums: Sequence[tuple[Node, Node]], tokens: Sequence[Node]) -> Node:
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


# --- parts of rows, casts of rows, and the numbers of tokens by which rows are read and summed ---


def keeps_rows(node: Node) -> bool:
    """Tell whether a method leaves all rows in place and unchanged but for rounding."""
    value = value_of(node)
    floats = value.is_floating_point() if isinstance(value, torch.Tensor) else node.target in ("clone", "contiguous")
    return is_cast(node) and floats


def only_user(rows: Node) -> Node:
    users = [user for user in rows.users if not is_length(user)]
    if len(users) != 1:
        what = " and ".join(describe(user) for user in users[:2]) if users else "nothing"
        raise Refused(f"its results are used by {what}, and not by one sum over the rows of a token")
    return users[0]


def is_length(node: Node) -> bool:
    return calls(node, torch.ops.aten.sym_size.int) or (node.op == "call_method" and node.target == "size")


def weights_of(user: Node, rows: Node) -> Node | None:
    """Return the routing weights ``[n, 1]`` with which ``user`` multiplies rows; None for anything else."""
    given = operands(user)
    others = [other for other in given if other is not rows]
    if not named(user, "mul") or len(given) != 2 or len(others) != 1:
        return None
    value = value_of(others[0])
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or not value.is_floating_point():
        return None
    # A single row would be one weight for all.
    return others[0] if str(value.shape[1]) == "1" and str(value.shape[0]) != "1" else None


def parts_of(user: Node, rows: Node) -> list[Node] | None:
    """Return all parts of ``split(rows, sizes)`` along the rows, in order; None for anything else."""
    if not named(user, "split", "split_with_sizes") or arg(user, 0) is not rows:
        return None
    sizes = user.args[1] if len(user.args) > 1 else None
    if not isinstance(sizes, (list, tuple)) or option(user, 2, "dim", 0) != 0 or not all(map(is_getitem, user.users)):
        return None
    parts = {arg(part, 1): part for part in user.users}
    if len(parts) != len(user.users) or sorted(parts) != list(range(len(sizes))):
        return None
    return [parts[index] for index in range(len(sizes))]


def joined(parts: Sequence[Node]) -> Node | None:
    """Return the concatenation of exactly these parts, if nothing else uses them."""
    users = {user for part in parts for user in part.users}
    whole = next(iter(users)) if len(users) == 1 else None
    return whole if whole is not None and is_cat(whole) and list(arg(whole, 0)) == list(parts) else None


def joined_split(rows: Node) -> Node | None:
    """Return x of ``cat(split(x, sizes))``; None for anything else."""
    if not is_cat(rows):
        return None
    first = arg(rows, 0)[0]
    split = arg(first, 0) if is_getitem(first) else None
    if not isinstance(split, Node) or not isinstance(split.args[0] if split.args else None, Node):
        return None
    parts = parts_of(split, arg(split, 0))
    whole: Node = arg(split, 0)
    return whole if parts is not None and list(arg(rows, 0)) == parts else None


def drop_parts(whole: Node, rows: Node) -> None:
    """Use rows in place of the concatenation of their parts."""
    parts = list(arg(whole, 0))
    split = arg(parts[0], 0)
    whole.replace_all_uses_with(rows)
    whole.graph.erase_node(whole)
    for node in (*parts, split):
        if not node.users:
            node.graph.erase_node(node)


def cut_alike(split: Node, entry: Node, parts: Sequence[Node]) -> bool:
    """Tell whether results are cut where their rows were put together."""
    rows = casts_behind(entry)[-1]
    if not is_cat(rows) or len(arg(rows, 0)) != len(parts):
        return False
    return all(
        is_length(size) and arg(size, 0) is piece and list(size.args[1:]) == [0]
        for size, piece in zip(arg(split, 1), arg(rows, 0), strict=True)
    )


def is_cat(node: Node) -> bool:
    along_rows = named(node, "cat", "concat") and bool(option(node, 1, "dim", 0) == 0)
    return along_rows and isinstance(arg(node, 0), (list, tuple))


def casts_behind(node: Node) -> list[Node]:
    """Return ``node``, and the nodes of which it is a cast."""
    found = [node]
    while keeps_rows(found[-1]):
        found.append(arg(found[-1], 0))
    return found


def after_casts(rows: Node) -> Node:
    """Return the last cast of rows, or the rows."""
    while keeps_rows(user := only_user(rows)):
        rows = user
    return rows


def quotient_of(index: Node) -> tuple[Node, int] | None:
    """Return ``order`` and k of ``order // k``, where order is the permutation that sorts a line."""
    floor = index.kwargs.get("rounding_mode") == "floor" and named(index, "div", "divide")
    if not (named(index, "floordiv", "floor_divide") or floor) or len(index.args) != 2:
        return None
    order, choices = index.args
    value = value_of(order)
    sorts_a_line = isinstance(value, torch.Tensor) and value.ndim == 1 and match(ORDER, order) is not None
    return (order, choices) if isinstance(choices, int) and isinstance(order, Node) and sorts_a_line else None


def inverts(facts: GraphFacts, user: Node, order: Node) -> bool:
    """Tell whether the index of ``rows[index]`` is the inverse of the permutation ``order``."""
    inverse = arg(user, 1)
    if not isinstance(inverse, Node) or value_of(inverse) is None:
        return False
    if named(inverse, "argsort"):
        return arg(inverse, 0) is order and len(inverse.args) == 1 and not inverse.kwargs.get("descending")
    # inverse = empty_like(order); inverse[order] = arange(len(order))
    made = named(inverse, "empty_like", "zeros_like") and arg(inverse, 0) is order
    changes = [node for node, storage in facts.changes if storage == storage_of(inverse) and not is_erased(node)]
    if not made or len(changes) != 1 or not calls(changes[0], operator.setitem) or changes[0] > user:
        return False
    target, index, values = (arg(changes[0], position) for position in range(3))
    return target is inverse and index is order and match(LINE, values) is not None


def same_index(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Tell whether indexes are the same node, or the same quotient of the same node."""
    if len(a) != len(b):
        return False
    return all(
        one is other or (named(one, "floordiv") and named(other, "floordiv") and one.args == other.args)
        for one, other in zip(a, b, strict=True)
    )
