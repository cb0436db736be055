"""call_torch_products: grouped products that torch's own kernel takes become its operator in the graph.

Needs    a graph that Inductor compiles for a GPU with that kernel; bf16, one operand, sizes of multiples of 16 bytes.
Changes  grouped_mm(x, w, offsets)               becomes   where(row < offsets[-1], _grouped_mm(x, w, offsets), 0)
         grouped_mm(x, w, offsets, filled=True)  becomes   _grouped_mm(x, w, offsets)
         grouped_mm_weight_grad(x, y, offsets)   becomes   _grouped_mm(x.t(), y, offsets)
Never    does so for own experts and replicas as two operands, or for gradients where the kernel leaves those of slots
         without rows unwritten.

An operator of Hecate looks at its operands in Python and launches a kernel that clears rows, which takes the host 60
to 140 µs for each product (docs/gpu.md). Inductor calls torch's directly, and fuses the mask with what reads the
product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, calls, take_place
from hecate.runtime.ops.grouped_mm import fits_torchs_kernel, writes_empty_slots

aten, prims = torch.ops.aten, torch.ops.prims


def call_torch_products(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every such product in ``gm``."""
    count = 0
    for node in list(gm.graph.nodes):
        if calls(node, torch.ops.hecate.grouped_mm):
            made = _product(node)
        elif calls(node, torch.ops.hecate.grouped_mm_weight_grad):
            made = _weight_grad(node)
        else:
            continue
        if made is not None:
            take_place(node, made)
            gm.graph.erase_node(node)
            count += 1
    return Outcome(rewritten=count)


def _product(node: Node) -> Node | None:
    operands: Any = (*node.args, False)
    x, w, offsets, filled = operands[:4]
    rows, matrices, ends = map(_value, (x, w, offsets))
    if not _fit(rows, matrices, ends):
        return None
    # The mask needs the number of rows, which only data may decide.
    if not filled and type(rows.shape[0]) is not int:
        return None
    here = Builder(node.graph, before=node, like=node)
    product = here.call(aten._grouped_mm.default, x, w, _int32(offsets, here))
    return product if filled else _without_rows_behind(product, offsets, rows, here)


def _without_rows_behind(product: Node, offsets: Node, rows: Tensor, here: Builder) -> Node:
    """Clear the rows behind the last offset, which the kernel leaves unwritten."""
    device, ends = rows.device, _value(offsets)
    numbers = dict(start=0, step=1, dtype=ends.dtype, device=device, requires_grad=False)
    row = here.call(prims.iota.default, rows.shape[0], **numbers)
    inside = here.call(aten.lt.Tensor, row, here.call(aten.select.int, offsets, 0, -1))
    zero = here.call(aten.full.default, [], 0.0, dtype=rows.dtype, device=device, pin_memory=False)
    return here.call(aten.where.self, here.call(aten.unsqueeze.default, inside, 1), product, zero)


def _weight_grad(node: Node) -> Node | None:
    operands: Any = node.args
    x, grad, offsets, transposed = operands
    left, right = (grad, x) if transposed else (x, grad)
    rows, others, ends = map(_value, (left, right, offsets))
    if type(rows.shape[0]) is not int or not (_fit(rows, others, ends) and writes_empty_slots(rows.device)):
        return None
    here = Builder(node.graph, before=node, like=node)
    turned = here.call(aten.permute.default, left, [1, 0])
    product = here.call(aten._grouped_mm.default, turned, right, _int32(offsets, here))
    return here.call(aten.permute.default, product, [0, 2, 1]) if transposed else product


def _int32(offsets: Node, here: Builder) -> Node:
    if _value(offsets).dtype == torch.int32:
        return offsets
    return here.call(prims.convert_element_type.default, offsets, torch.int32)


def _fit(rows: Tensor, other: Tensor, ends: Tensor) -> bool:
    """Tell whether torch's kernel takes operands like these, whatever the number of rows."""
    sizes = (ends.shape[0], rows.shape[1], *other.shape[1:], *rows.stride(), *other.stride())
    if any(type(size) is not int for size in sizes) or not fits_torchs_kernel(rows, other, ends):
        return False
    # The kernel takes one of the last two dimensions without gaps, and all else at multiples of 16 bytes.
    return all(
        1 in one.stride()[-2:] and all(step == 1 or step * one.element_size() % 16 == 0 for step in one.stride())
        for one in (rows, other)
    )


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
