"""share_gathers: read every expert parameter once.

Needs    gather_experts nodes.
Changes  a second gather of the same shard becomes the first one's result.
Never    merges across a change of grad mode: a gather under no_grad carries no gradient.

    a = gather(w); b = gather(w)   becomes   a = gather(w); b = a
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from hecate.passes.contract import Outcome, PassContext
from hecate.passes.nodes import arg, calls


def share_gathers(gm: GraphModule, context: PassContext) -> Outcome:
    """Keep the first gather of each shard in each stretch of one grad mode."""
    first: dict[tuple[Node, int], Node] = {}
    merged = 0
    for node in list(gm.graph.nodes):
        if calls(node, torch._C._set_grad_enabled):
            first.clear()
        elif calls(node, torch.ops.hecate.gather_experts):
            key = (arg(node, 0), arg(node, 2))
            if key in first:
                node.replace_all_uses_with(first[key])
                gm.graph.erase_node(node)
                merged += 1
            else:
                first[key] = node
    return Outcome(rewritten=merged)
