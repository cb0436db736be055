"""accumulate_rows: what a loop over experts adds to rows is written without reading them.

Needs    out[mask] += y with a mask of booleans, where y is computed with gathered experts.
Changes  t = out[mask]; t += y; out[mask] = t     becomes   out.index_put_((mask,), y, accumulate=True)
Never    touches indices that are numbers: of those that come twice, only the last is written.

A turn that reads the output needs all turns before it, and no loop whose turns need each other can become one
computation (see ``group_expert_loops``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts, gathers_by_layer, storage_of, value_of
from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, arg, calls, closure_forward, is_getitem
from hecate.private import is_erased


def accumulate_rows(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every such addition in ``gm``."""
    gathers = [gather for found in gathers_by_layer(gm.graph).values() for gather in found]
    if not gathers:
        return Outcome()
    writes = [node for node in gm.graph.nodes if calls(node, operator.setitem)]
    of_experts = closure_forward(gathers) if writes else set()
    # Changes of the graph as it is now; rewrites change the same memory in the same places.
    changes = GraphFacts(gm.graph).changes if writes else []
    return Outcome(rewritten=sum(_rewrite(node, changes) for node in writes if node in of_experts))


def _rewrite(write: Node, changes: Sequence[tuple[Node, int | None]]) -> bool:
    out, mask, total = (arg(write, index) for index in range(3))
    value, target = value_of(mask), value_of(out)
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or not isinstance(target, torch.Tensor):
        return False
    if not calls(total, operator.iadd, operator.add) or set(total.users) != {write}:
        return False
    read, added = arg(total, 0), arg(total, 1)
    if not _reads(read, out, mask) and calls(total, operator.add):
        read, added = added, read
    lengths = [user for user in read.users if user is not total] if _reads(read, out, mask) else None
    if lengths is None or not all(calls(user, torch.ops.aten.sym_size.int) for user in lengths) or added is read:
        return False
    memory = {storage_of(out), storage_of(mask), None}
    if any(not is_erased(node) and read < node < write and storage in memory for node, storage in changes):
        return False
    here = Builder(write.graph, before=write)
    rows = value_of(added)
    if not isinstance(added, Node) or not isinstance(rows, torch.Tensor) or rows.dtype != target.dtype:
        return False
    here.method("index_put_", out, (mask,), added, True)
    if lengths:
        # Torch asks how many rows there are; the mask itself has as many.
        counted = Builder(write.graph, before=read).call(operator.getitem, mask, mask)
        for user in lengths:
            user.args = (counted, 0)
    for node in (write, total, read):
        write.graph.erase_node(node)
    return True


def _reads(node: Any, out: Any, mask: Any) -> bool:
    return isinstance(node, Node) and is_getitem(node) and arg(node, 0) is out and arg(node, 1) is mask
