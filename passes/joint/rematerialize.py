"""rematerialize: drop gathered parameters after the forward, and gather them again in the backward.

Needs    a joint graph of forward and backward.
Changes  nodes that gather parameters, and views of their results, get torch's recompute tag, so that the
         partitioner puts a copy of them into the backward instead of saving the results.
Never    touches exchanges, counts, placements or routes: these are never computed again.

Experts are gathered again if the user says so (``Config(rematerialize=True)``, paper section 4); sharded dense
parameters always, because to keep them is to not shard them.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import is_getitem, is_view
from hecate.runtime.comm.collective import whole_of


def rematerialize(gm: GraphModule, context: PassContext) -> Outcome:
    """Tag the gathers."""
    count = 0
    again = ("always", "if rematerialized") if context.rematerialize else ("always",)
    for node in gm.graph.nodes:
        collective = whole_of(node.target) if node.op == "call_function" else None
        if collective is not None and collective.gathered_again in again:
            for tagged in _with_views(node):
                tagged.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            count += 1
    return Outcome(rewritten=count)


def _with_views(node: Node) -> list[Node]:
    """Return a gather, and all views of its results: to save one of these would be to save the parameters."""
    found = [node]
    for seen in found:
        found += [user for user in seen.users if is_getitem(user) or is_view(user)]
    return found
