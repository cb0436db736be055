"""order_collectives: pin the order in which collectives start, and note what is predicted for each.

Needs    ``f_start`` nodes in the order in which they shall start.
Changes  a = f_start(x, [], ..); b = g_start(y, [], ..)
         becomes   a = f_start(x, [], ..); b = g_start(y, [a], ..)
Never    moves anything.

Ranks must start collectives in one order. A compiler may move operators along data flow, so the order is data flow.
"""

from __future__ import annotations

from itertools import accumulate

from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext
from hecate.passes.final.collective_notes import write_note
from hecate.passes.final.in_flight import in_flight
from hecate.passes.final.node_cost import Clock


def order_collectives(gm: GraphModule, context: PassContext) -> Outcome:
    """Give every start the token of the one before."""
    clock = Clock(gm, context)
    nodes = list(gm.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    collectives = in_flight(nodes)
    # Compute up to each node; a collective hides behind what lies between its start and its wait.
    seconds = list(accumulate(map(clock.seconds, nodes), initial=0.0))
    before: Node | None = None
    for one in collectives:
        *args, _, _ = one.start.args
        behind = seconds[position[one.wait]] - seconds[position[one.start]]
        sent = clock.sent_bytes(one.start, one.wait)
        note = write_note(one.start, context, sent / context.link_bytes, behind, sent)
        one.start.args = (*args, [before] if before is not None else [], note)
        before = one.start
    return Outcome(rewritten=len(collectives))
