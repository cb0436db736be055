"""Questions about forward and backward graphs: ATen operators, fake values in ``meta["val"]``."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from hecate.private import OpOverload, schema_of


def operator_of(node: Node) -> OpOverload:
    """Return the operator that a node of a forward or backward graph calls."""
    assert isinstance(node.target, OpOverload)
    return node.target


def arguments_of(node: Node) -> dict[str, Any]:
    """Return a node's arguments by name, in the operator's order."""
    names = [argument.name for argument in schema_of(operator_of(node)).arguments]
    given: list[Any] = list(node.args)
    return {name: given[i] if i < len(given) else node.kwargs[name] for i, name in enumerate(names)}
