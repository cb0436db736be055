"""Uses of one expert's parameter in a turn of a loop, and whether they have a form for all experts."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from hecate.passes.analysis.torch_values import value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, calls, describe, is_getitem, operands
from hecate.passes.match import name_of, named
from hecate.private import builtin_linear

FORMS = "x @ w[e], torch.nn.functional.linear(x, w[e]) or one addition of a bias for each expert"
_LINEAR = (torch.nn.functional.linear, builtin_linear)
_SUMS = (operator.add, torch.add)


def is_one_expert(node: Node) -> bool:
    return is_getitem(node) and isinstance(arg(node, 1), int) and calls(arg(node, 0), torch.ops.hecate.gather_experts)


def matrix_operand(node: Node, views: set[Node]) -> str:
    """Return how an anchor uses an expert's parameter: "product", "linear" or "bias". Raises Refused."""
    args = operands(node)
    own = [index for index, arg in enumerate(args) if arg in views]
    method = node.target if node.op == "call_method" else None
    if named(node, "matmul", "mm") and own == [1] and len(args) == 2:
        return "product"
    if calls(node, *_LINEAR) and own and own[0] == 1 and set(own) <= {1, 2}:
        return "linear"
    if (calls(node, *_SUMS) or method == "add") and len(own) == 1 and len(args) == 2:
        value = value_of(args[own[0]])
        if isinstance(value, torch.Tensor) and value.ndim == 1:
            return "bias"
    raise Refused(f"no grouped form of {describe(node)}", node, fix=FORMS)


def is_transpose(node: Node) -> bool:
    """Tell whether a node is the transpose of a matrix, in any spelling."""
    name = name_of(node)
    if name == "transpose":
        return {arg(node, 1) % 2, arg(node, 2) % 2} == {0, 1}
    # Since torch 2.15 Dynamo spells .T as the operator that it is.
    return name in ("t", "mT", "numpy_T") or (name == "getattr" and arg(node, 1) in ("T", "mT"))
