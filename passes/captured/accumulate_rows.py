"""accumulate_rows: what a loop over experts adds to rows is written without reading them.

Needs    out[rows] += y with a mask of booleans, or with numbers that come once (torch.where(topk == expert)), where
         y is computed with gathered experts.
Changes  t = out[rows]; t += y; out[rows] = t     becomes   out.index_put_((rows,), y, accumulate=True)
Never    touches numbers that may come twice: only the last of them is written.

A turn that reads the output needs all turns before it, and no loop whose turns need each other can become one
computation (see ``group_expert_loops``).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.distinct_numbers import come_once
from hecate.passes.analysis.torch_values import GraphFacts, gathers_by_layer, storage_of, value_of
from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, calls, closure_forward
from hecate.passes.match import call, match, one_of
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
    changed = {storage for _, storage in changes}
    return Outcome(rewritten=sum(_rewrite(node, changes, changed) for node in writes if node in of_experts))


# t = out[rows]; t += y; out[rows] = t
_READ = call("getitem", "out", "rows", bind="read")
_SUM = one_of(
    call("iadd", _READ, "added", bind="total"),
    call("add", _READ, "added", bind="total"),
    call("add", "added", _READ, bind="total"),
)
_ACCUMULATES = call("setitem", "out", "rows", _SUM)


def _rewrite(write: Node, changes: Sequence[tuple[Node, int | None]], changed: Collection[int | None]) -> bool:
    if (found := match(_ACCUMULATES, write)) is None:
        return False
    out, rows, total, read, added = (found[name] for name in ("out", "rows", "total", "read", "added"))
    value, target, values = value_of(rows), value_of(out), value_of(added)
    if not all(isinstance(one, torch.Tensor) for one in (value, target, values)) or values.dtype != target.dtype:
        return False
    masks = value.dtype == torch.bool
    if not (masks or come_once(rows, changed)) or total.kwargs or set(total.users) != {write}:
        return False
    lengths = [user for user in read.users if user is not total]
    if not all(calls(user, torch.ops.aten.sym_size.int) for user in lengths) or added is read:
        return False
    memory = {storage_of(out), storage_of(rows), None}
    if any(not is_erased(node) and read < node < write and storage in memory for node, storage in changes):
        return False
    Builder(write.graph, before=write).method("index_put_", out, (rows,), added, True)
    if lengths:
        # Torch asks how many rows there are; a mask of itself has as many.
        counted = Builder(write.graph, before=read).call(operator.getitem, rows, rows) if masks else rows
        for user in lengths:
            user.args = (counted, 0)
    for node in (write, total, read):
        write.graph.erase_node(node)
    return True
