"""simplify_views: views that change nothing are no calls, and one that no strides allow is a copy.

Needs    a forward or backward graph that runs node by node. Nothing is changed in place behind a view by now.
Changes  aten.view(x, sizes)   becomes   x, where x has these sizes, and aten.reshape(x, sizes) elsewhere
Never    takes away a result of the graph, which stays a view of its own, or a view of sizes that vary.

Where a gradient arrives with other strides than were traced (linear attention of Qwen3-Next), aten.view fails.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from hecate.passes.base import Outcome, PassContext

aten = torch.ops.aten


def simplify_views(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every view in ``gm``."""
    rewritten = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.view.default:
            continue
        node.target = aten.reshape.default
        rewritten += 1
        source, result = node.args[0].meta.get("val"), node.meta.get("val")
        if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)):
            continue
        sizes = [*source.shape, *result.shape]
        unchanged = all(isinstance(size, int) for size in sizes) and source.shape == result.shape
        if unchanged and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    return Outcome(rewritten=rewritten)
