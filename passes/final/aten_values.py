"""Questions about forward and backward graphs: ATen operators, fake values in ``meta["val"]``."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from hecate.private import FakeTensor, OpOverload, schema_of


def fake_mode_of(gm: GraphModule) -> Any:
    """The mode that made the graph's fake tensors, or None."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def operator_of(node: Node) -> OpOverload:
    """The operator that a node of a forward or backward graph calls."""
    assert isinstance(node.target, OpOverload)
    return node.target


def arguments_of(node: Node) -> dict[str, Any]:
    """Its arguments by name, in the operator's order."""
    names = [argument.name for argument in schema_of(operator_of(node)).arguments]
    given: list[Any] = list(node.args)
    return {name: given[i] if i < len(given) else node.kwargs[name] for i, name in enumerate(names)}
