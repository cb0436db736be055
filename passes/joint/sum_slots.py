"""sum_slots: gradients of what each expert has one row of are summed slot by slot.

Needs    a joint graph with zeros.index_put([slots], y, accumulate), as autograd writes it for x[slots], on an
         accelerator, where slots = row_slots(offsets, n): biases and scales of experts, looked up by each row.
Changes  zeros.index_put([slots], y, True)
         becomes   grouped_mm_weight_grad(ones [n, 1], y, offsets, False).squeeze(1)
Never    does so where there are more or fewer zeros than slots, or what is looked up has more than one dimension.

To add is atomic there, and all rows of an expert are added to one: thousands, in any order, in bfloat16 rounded each
time. The product sums them in float32, in their order.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, arg, calls, erase_unused, take_place
from hecate.passes.joint.additions import added, adds_in_any_order, is_zeros, same_sizes, value_of

aten, hecate = torch.ops.aten, torch.ops.hecate


def sum_slots(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every such addition in ``gm``."""
    count = 0
    for node in list(gm.graph.nodes):
        if (operands := added(node)) is not None and adds_in_any_order(value_of(node)):
            count += _rewrite(node, *operands)
    return Outcome(rewritten=count)


def _rewrite(addition: Node, zeros: Node, slots: Node, rows: Node) -> bool:
    if not is_zeros(zeros) or not calls(slots, hecate.row_slots):
        return False
    offsets, value, entries = arg(slots, 0), value_of(addition), value_of(rows)
    if entries.dim() != 2 or not same_sizes(value_of(slots).shape, entries.shape[:1]):
        return False
    if not same_sizes(value.shape, [*value_of(offsets).shape, entries.shape[1]]):
        return False
    here = Builder(addition.graph, before=addition, like=addition)
    count = here.call(aten.sym_size.int, rows, 0) if not isinstance(entries.shape[0], int) else entries.shape[0]
    ones = here.call(aten.full.default, [count, 1], 1, dtype=entries.dtype, device=entries.device, pin_memory=False)
    sums = here.call(hecate.grouped_mm_weight_grad.default, ones, rows, offsets, False)
    new = here.call(aten.squeeze.dim, sums, 1)
    take_place(addition, new)
    erase_unused([addition, zeros])
    return True
