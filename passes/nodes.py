"""Small questions about FX nodes that several passes ask."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node


def arg(node: Any, index: int) -> Any:
    """A positional argument of a node. FX types it as a union of everything; passes know what it is."""
    return node.args[index]


def operands(node: Node) -> list[Any]:
    """All arguments, keyword ones after the positional ones."""
    return [*node.args, *node.kwargs.values()]


def calls(node: Any, *targets: Any) -> bool:
    """Whether ``node`` calls one of ``targets``; an operator packet stands for its default overload too."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    for target in targets:
        if node.target is target:
            return True
        if isinstance(target, torch._ops.OpOverloadPacket) and node.target is target.default:
            return True
    return False


def is_getitem(node: Any) -> bool:
    return calls(node, operator.getitem)


def gathers_by_layer(graph: Graph) -> dict[int, list[Node]]:
    """The ``gather_experts`` nodes of each layer id, in graph order."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if calls(node, torch.ops.hecate.gather_experts):
            found.setdefault(int(arg(node, 2)), []).append(node)
    return found


def positions(graph: Graph) -> dict[Node, int]:
    """The place of every node in the graph's order."""
    return {node: index for index, node in enumerate(graph.nodes)}


def descendants(starts: Iterable[Node]) -> set[Node]:
    """All nodes that depend on ``starts``, without ``starts`` themselves (unless on each other)."""
    seen: set[Node] = set()
    stack = list(starts)
    while stack:
        for user in stack.pop().users:
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return seen


def ancestors(starts: Iterable[Node]) -> set[Node]:
    """All nodes that ``starts`` depend on, without ``starts`` themselves (unless on each other)."""
    seen: set[Node] = set()
    stack = list(starts)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


def mutates(node: Node) -> Node | None:
    """The node whose tensor this one changes in place, as written in the graph (``add_``, ``+=``, ``out=``)."""
    if isinstance(node.kwargs.get("out"), Node):
        return node.kwargs["out"]  # type: ignore[return-value]
    first = arg(node, 0) if node.args and isinstance(arg(node, 0), Node) else None
    if node.op == "call_method":
        name = str(node.target)
        return first if name.endswith("_") and not name.endswith("__") else None
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if node.target in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
            return first
    return None


_INPLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.iand, operator.ior, operator.setitem,
}  # fmt: skip


def value_of(node: Any) -> Any:
    """The fake value that Dynamo recorded for a node, or None."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def describe(node: Node) -> str:
    """A node as a user recognizes it: its call, and the line of model code it came from."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")]
    return f"{target} in '{trace[-1]}'" if trace else f"{target} (%{node.name})"


def storage_of(node: Any) -> int | None:
    """Identity of the memory behind a node's tensor; views share it. None where nothing is known."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
