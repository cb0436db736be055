"""Parts of rows, casts of rows, and the numbers of tokens by which rows are read and summed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from hecate.passes.analysis.torch_values import GraphFacts, storage_of, value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, calls, describe, is_getitem
from hecate.passes.match import LINE, ORDER, is_cast, match, named
from hecate.private import is_erased


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


def parts_of(user: Node, rows: Node) -> list[Node] | None:
    """Return all parts of ``split(rows, sizes)`` along the rows, in order; None for anything else."""
    if not named(user, "split", "split_with_sizes") or arg(user, 0) is not rows:
        return None
    sizes = user.args[1] if len(user.args) > 1 else None
    dim = user.kwargs.get("dim", user.args[2] if len(user.args) > 2 else 0)
    if not isinstance(sizes, (list, tuple)) or dim != 0 or not all(map(is_getitem, user.users)):
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
    along_rows = bool(node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) == 0)
    return named(node, "cat", "concat") and along_rows and isinstance(arg(node, 0), (list, tuple))


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
    if not (calls(index, operator.floordiv) or named(index, "floor_divide") or floor) or len(index.args) != 2:
        return None
    order, choices = arg(index, 0), arg(index, 1)
    return (order, choices) if isinstance(choices, int) and isinstance(order, Node) and _is_order(order) else None


def _is_order(order: Node) -> bool:
    """Tell whether a node is the permutation by which a line is sorted."""
    value = value_of(order)
    return isinstance(value, torch.Tensor) and value.ndim == 1 and match(ORDER, order) is not None


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
    return all(one is other or _same_quotient(one, other) for one, other in zip(a, b, strict=True))


def _same_quotient(a: Any, b: Any) -> bool:
    if not isinstance(a, Node) or not isinstance(b, Node):
        return False
    alike = (a.op, a.target, a.args, a.kwargs) == (b.op, b.target, b.args, b.kwargs)
    return bool(alike) and calls(a, operator.floordiv)
