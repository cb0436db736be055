"""What is done to graphs that run node by node (``backend="aot_eager"``); Inductor does it by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from hecate.passes.fx import arg, calls
from hecate.passes.joint.read_permutations import is_order

aten = torch.ops.aten
# In the meta of a node that reads rows by numbers of which none is negative.
_READS_ROWS = "hecate_reads_rows"


def simplify_views(gm: GraphModule) -> None:
    """As under Inductor, a view that changes nothing is no call, and one that no strides allow becomes a copy.

    Where a gradient arrives with other strides than were traced (linear attention of Qwen3-Next), aten.view fails.
    Nothing is changed in place behind a view by now. A result of the graph stays a view of its own.
    """
    for node in list(gm.graph.nodes):
        if node.target is not aten.view.default:
            continue
        node.target = aten.reshape.default
        source, result = node.args[0].meta.get("val"), node.meta.get("val")
        if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)):
            continue
        sizes = [*source.shape, *result.shape]
        unchanged = all(isinstance(size, int) for size in sizes) and source.shape == result.shape
        if unchanged and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def note_row_reads(gm: GraphModule) -> None:
    """Find what :func:`select_rows` may rewrite, in a graph that shows where the numbers of rows come from.

    Autograd may part it then, which may compute ``x[numbers]`` again where it would keep another operator's result.
    """
    for node in gm.graph.nodes:
        if calls(node, aten.index.Tensor):
            rows, numbers = arg(node, 0), arg(node, 1)
            if len(numbers) == 1 and _lies_in_rows(rows) and _counts_rows(numbers[0]):
                node.meta[_READS_ROWS] = True


def select_rows(gm: GraphModule) -> int:
    """Rows read by their numbers are copied as wholes: ``x[numbers]`` becomes ``x.index_select(0, numbers)``.

    The same values. On CPUs, where this is done, ``x[numbers]`` goes from element to element, and takes three to nine
    times as long for rows of 32 to 96 numbers. It may count from the end, which ``index_select`` may not, so numbers
    must be known not to be negative: those of a sort, of its inverse, and what is such a number divided by how many
    rows a token has.

    Args:
        gm: after :func:`note_row_reads`, or a part of such a graph.

    Returns:
        How many there were.
    """
    found = [node for node in gm.graph.nodes if node.meta.get(_READS_ROWS) and calls(node, aten.index.Tensor)]
    for node in found:
        node.target, node.args = aten.index_select.default, (arg(node, 0), 0, arg(node, 1)[0])
    gm.recompile()
    return len(found)


def _lies_in_rows(node: Node) -> bool:
    """Whether it has rows on a CPU, one behind the other: the result of either operator then does."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.device.type != "cpu":
        return False
    step: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(stride == step):
            return False
        step = step * size
    return True


def _counts_rows(node: Any) -> bool:
    """Whether it is one line of numbers of which none is negative."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.device.type != "cpu":
        return False
    return value.dtype == torch.int64 and _not_negative(node)


def _not_negative(node: Node) -> bool:
    if is_order(node):
        return True
    if calls(node, aten.floor_divide) or (
        calls(node, aten.div.Tensor_mode, aten.div.Scalar_mode) and node.kwargs.get("rounding_mode") == "floor"
    ):
        divisor = arg(node, 1)
        return isinstance(divisor, int) and divisor > 0 and _not_negative(arg(node, 0))
    # Not any view: of other dtypes, and the one that negates, are some too.
    return calls(node, aten.view, aten.alias, aten.detach) and _not_negative(arg(node, 0))
