"""note_row_reads: reads of rows by numbers of which none is negative are noted, for ``select_rows``.

Needs    a joint graph that will run node by node, or one without gradients: it shows where numbers come from.
Changes  nothing but a note on x[numbers], where numbers are those of a sort, of its inverse, or such a number divided
         by how many rows a token has
Never    notes numbers of which it cannot be told whether one is negative, or tensors that are not rows on a CPU.

Autograd then parts the graph. It may compute ``x[numbers]`` again where it would keep another operator's result, so
the read is not rewritten yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import arg, calls
from hecate.passes.joint.read_permutations import is_order

aten = torch.ops.aten
# Key in the meta of a node that reads rows by numbers of which none is negative.
READS_ROWS = "hecate_reads_rows"


def note_row_reads(gm: GraphModule, context: PassContext) -> Outcome:
    """Note every such read in ``gm``."""
    noted = 0
    for node in gm.graph.nodes:
        if calls(node, aten.index.Tensor):
            rows, numbers = arg(node, 0), arg(node, 1)
            if len(numbers) == 1 and _lies_in_rows(rows) and _counts_rows(numbers[0]):
                node.meta[READS_ROWS] = True
                noted += 1
    return Outcome(rewritten=noted)


def _lies_in_rows(node: Node) -> bool:
    """Tell whether a value has rows on a CPU, one behind the other: the result of either operator then does."""
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
    """Tell whether a value is one line of numbers of which none is negative."""
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
    # Only these views keep the numbers: some change the dtype, and one negates.
    return calls(node, aten.view, aten.alias, aten.detach) and _not_negative(arg(node, 0))
