"""share_gathers: read every expert parameter once.

Needs    gather_experts nodes.
Changes  a second gather of the same shard, or of the same cast or view of it, becomes the first one's result.
Never    merges gathers of different grad modes: one under no_grad carries no gradient.

    a = gather(w); b = gather(w)   becomes   a = gather(w); b = a
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts
from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import arg, calls
from hecate.runtime.ops.gradients import replicate


def share_gathers(gm: GraphModule, context: PassContext) -> Outcome:
    """Keep the first gather of each shard in each grad mode."""
    first: dict[Any, Node] = {}
    modes = GraphFacts(gm.graph).grad_modes
    merged = 0
    for node in list(gm.graph.nodes):
        if calls(node, torch.ops.hecate.gather_experts):
            shard = arg(node, 0)
            key = (_identity(shard), arg(node, 2), modes[node])
            if key not in first:
                first[key] = node
                continue
            node.replace_all_uses_with(first[key])
            gm.graph.erase_node(node)
            while not shard.users and (shard.op == "call_method" or calls(shard, replicate)):
                unused, shard = shard, arg(shard, 0)
                gm.graph.erase_node(unused)
            merged += 1
    return Outcome(rewritten=merged)


def _identity(shard: Node) -> Any:
    """Return the parameter, the dtype that it is cast to, and the sizes that it is viewed with.

    A read through ``replicate``, with the same number, is one of the same parameter.
    """
    if calls(shard, replicate):
        return (_identity(arg(shard, 0)), arg(shard, 1))
    if shard.op == "call_method" and shard.target in ("to", "view") and len(shard.all_input_nodes) == 1:
        return (_identity(arg(shard, 0)), shard.args[1:], tuple(shard.kwargs.items()))
    return shard
