"""order_collectives: pin the order in which collectives start.

Needs    ``f_start`` nodes in the order in which they shall start.
Changes  a = f_start(x, [], ..); b = g_start(y, [], ..)
         becomes   a = f_start(x, [], ..); b = g_start(y, [a], ..)
Never    moves anything.

Ranks must start collectives in one order. A compiler may move operators along data flow, so the order is data flow.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from hecate.passes.contract import Outcome, PassContext
from hecate.runtime.define import STARTS


def order_collectives(gm: GraphModule, context: PassContext) -> Outcome:
    """Give every start the token of the one before."""
    before: Node | None = None
    count = 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in STARTS:
            *args, _, note = node.args
            node.args = (*args, [before] if before is not None else [], note)
            before = node
            count += 1
    return Outcome(rewritten=count)
