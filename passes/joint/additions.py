"""Additions to zeros in a joint graph, as autograd writes them for reads by an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from hecate.passes.fx import arg, calls, option

aten = torch.ops.aten


def adds_in_any_order(value: torch.Tensor) -> bool:
    """Tell whether rows are added to ``value`` by many threads at once, with atomics: on everything but CPUs."""
    return value.device.type != "cpu"


def added(node: Node) -> tuple[Node, Node, Node] | None:
    """Return the node to which a node adds, the index of its rows, and the rows that it adds, or None."""
    if calls(node, aten.index_put) and writes_sums(node):
        zeros, indices, rows = (arg(node, place) for place in range(3))
        return (zeros, indices[0], rows) if len(indices) == 1 else None
    if calls(node, aten.index_add) and not node.kwargs and arg(node, 1) == 0:
        return arg(node, 0), arg(node, 2), arg(node, 3)
    return None


def writes_sums(write: Node) -> bool:
    """Tell whether ``index_put`` adds to the values there; by default it overwrites them."""
    return bool(option(write, 3, "accumulate", False))


def is_zeros(node: Node) -> bool:
    """Tell whether a node makes a tensor of zeros."""
    if calls(node, aten.full, aten.full_like):
        return bool(arg(node, 1) == 0)
    return calls(node, aten.zeros, aten.zeros_like, aten.new_zeros)


def value_of(node: Any) -> torch.Tensor:
    """Return the fake tensor that a node returns."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Tell whether shapes are known to be equal, whatever symbols stand for."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))
