"""The products of one expert's parameters: where they stand in a turn of a loop, and in which form."""

from __future__ import annotations

import torch
from torch.fx import Node

from hecate.passes.analysis.torch_values import shape_of, value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, calls, describe, is_getitem, operands
from hecate.passes.match import name_of, named
from hecate.private import builtin_linear

FORMS = "x @ w[e], torch.nn.functional.linear(x, w[e]), norms, and sums and products with a vector of each expert"
_LINEAR = (torch.nn.functional.linear, builtin_linear)


def is_one_expert(node: Node) -> bool:
    return is_getitem(node) and isinstance(arg(node, 1), int) and calls(arg(node, 0), torch.ops.hecate.gather_experts)


def matrix_operand(node: Node, views: set[Node]) -> str:
    """Return how an anchor uses an expert's parameters: "product", "linear", "norm" or "vector". Raises Refused."""
    args = operands(node)
    own = [index for index, arg in enumerate(args) if arg in views]
    if named(node, "matmul", "mm") and own == [1] and len(args) == 2:
        return "product"
    if calls(node, *_LINEAR) and own and own[0] == 1 and set(own) <= {1, 2}:
        return "linear"
    if (
        named(node, "layer_norm", "rms_norm")
        and own
        and own[0] >= 2
        and all(len(shape_of(args[i])) == 1 for i in own)
    ):
        return "norm"
    if named(node, "add", "sub", "mul", "truediv") and len(own) == 1 and len(args) == 2:
        # Of the last dimension of rows, which have more of them.
        rows, vector = (value_of(args[index]) for index in (1 - own[0], own[0]))
        if isinstance(vector, torch.Tensor) and vector.ndim == 1 and isinstance(rows, torch.Tensor) and rows.ndim > 1:
            return "vector"
    raise Refused(f"no grouped form of {describe(node)}", node, fix=FORMS)


def is_elementwise(view: Node) -> bool:
    """Tell whether a parameter is added to or multiplied with a number, as in ``(1 + weight)``."""
    numbers = [given for given in operands(view) if isinstance(given, (int, float))]
    return named(view, "add", "sub", "mul") and len(operands(view)) == 2 and len(numbers) == 1


def is_transpose(node: Node) -> bool:
    """Tell whether a node is the transpose of a matrix, in any spelling."""
    name = name_of(node)
    if name == "transpose":
        return {arg(node, 1) % 2, arg(node, 2) % 2} == {0, 1}
    # Since torch 2.15 Dynamo spells .T as the operator that it is.
    return name in ("t", "mT", "numpy_T") or (name == "getattr" and arg(node, 1) in ("T", "mT"))
