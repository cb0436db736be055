"""rematerialize: drop gathered parameters after the forward, and gather them again in the backward.

Needs    a joint graph of forward and backward.
Changes  nodes that gather parameters get torch's recompute tag, so that the partitioner puts a copy of them
         into the backward instead of saving their results.
Never    touches exchanges, counts, placements or routes: these are never computed again.

Experts are gathered again if the user says so (``Config(rematerialize=True)``, paper section 4); sharded dense
parameters always, because to keep them is to not shard them.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from hecate.passes.contract import Outcome, PassContext
from hecate.passes.nodes import calls, is_getitem


def rematerialize(gm: GraphModule, context: PassContext) -> Outcome:
    """Tag the gathers."""
    hecate, count = torch.ops.hecate, 0
    experts = (hecate.sparse_all_gather, hecate.gather_experts) if context.rematerialize else ()
    dense = (hecate.gather_dense,) if hasattr(hecate, "gather_dense") else ()
    for node in gm.graph.nodes:
        if calls(node, *experts, *dense):
            for tagged in (node, *(user for user in node.users if is_getitem(user))):
                tagged.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            count += 1
    return Outcome(rewritten=count)
