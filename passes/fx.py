"""Small questions about FX nodes that several passes ask."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from hecate.passes.base import Refused


def arg(node: Any, index: int) -> Any:
    """A positional argument of a node. FX types it as a union of everything; passes know what it is.

    Raises:
        Refused: the call passes it by name, which no pass expects.
    """
    if index >= len(node.args):
        raise Refused(f"operands by name in {describe(node)}")
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
    out = node.kwargs.get("out")
    if isinstance(out, Node):
        return out
    first = arg(node, 0) if node.args and isinstance(arg(node, 0), Node) else None
    if node.kwargs.get("inplace") is True:
        return first
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
    operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imod, operator.imatmul,
    operator.ilshift, operator.irshift, operator.setitem,
}  # fmt: skip


def value_of(node: Any) -> Any:
    """The fake value that Dynamo recorded for a node, or None."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def describe(node: Node) -> str:
    """A node as a user recognizes it: its call, and the line of model code it came from."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")]
    return f"{target} in '{trace[-1]}'" if trace else f"{target} (%{node.name})"


def grad_modes(graph: Graph) -> dict[Node, bool]:
    """Whether gradients are recorded at each node."""
    modes: dict[Node, bool] = {}
    enabled = True
    for node in graph.nodes:
        modes[node] = enabled
        if calls(node, torch._C._set_grad_enabled):
            enabled = bool(arg(node, 0))
    return modes


def refuse_changes_of(values: Iterable[Node], until: Node) -> None:
    """Raise if one of ``values`` is changed in place, itself or through a view, between its making and ``until``.

    An in-place operation is no edge of the graph: who moves or replaces the value would miss the change.

    Raises:
        Refused: names the operation.
    """
    place = positions(until.graph)
    made: dict[int | None, int] = {}
    for value in values:
        storage = storage_of(value)
        if storage is not None:
            made[storage] = min(place[value], made.get(storage, place[value]))
    for node in until.graph.nodes:
        target = mutates(node)
        if target is None or place[node] > place[until]:
            continue
        storage = storage_of(target)
        if storage is None or (storage in made and place[node] > made[storage]):
            raise Refused(f"in-place {describe(node)}")


def same_on_all_ranks(node: Node) -> bool:
    """Whether a value is computed from parameters, buffers and constants alone, not from a rank's own tokens."""
    return all(_is_state(source) for source in ancestors([node]) | {node} if source.op == "placeholder")


def _is_state(placeholder: Node) -> bool:
    source = getattr(placeholder, "_dynamo_source", None)
    named = source is not None and ("_parameters[" in source.name or "_buffers[" in source.name)
    return named or isinstance(value_of(placeholder), torch.nn.Parameter)


def storage_of(node: Any) -> int | None:
    """Identity of the memory behind a node's tensor; views share it. None where nothing is known."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


# --- forward and backward graphs ---


def fake_mode_of(gm: GraphModule) -> Any:
    """The mode that made the graph's fake tensors, or None."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def operator_of(node: Node) -> torch._ops.OpOverload:
    """The operator that a node of a forward or backward graph calls."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target


def operator_name(node: Node) -> str:
    """Its name without the namespace."""
    return operator_of(node).name().split("::")[1]


def arguments_of(node: Node) -> dict[str, Any]:
    """Its arguments by name, in the operator's order."""
    names = [argument.name for argument in operator_of(node)._schema.arguments]
    given: list[Any] = list(node.args)
    return {name: given[i] if i < len(given) else node.kwargs[name] for i, name in enumerate(names)}


def is_view(node: Node) -> bool:
    """Whether an ATen node returns a view of its input, at no cost."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )
