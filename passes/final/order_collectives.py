"""order_collectives: pin the order in which collectives start, and note what is predicted for each.

Needs    ``f_start`` nodes in the order in which they shall start.
Changes  a = f_start(x, [], ..); b = g_start(y, [], ..)
         becomes   a = f_start(x, [], ..); b = g_start(y, [a], ..)
         and, for counts of rows
         a = f_start(x, [], ..); y = gather(..); c = f_wait(a, x', []); b = g_start(y, ..)
         becomes   a = f_start(x, [], ..); y = gather(..); c = f_wait(a, x', [y]); b = g_start(y, ..)
Never    moves anything.

Ranks must start collectives in one order. A compiler may move operators along data flow, so the order is data flow.
So is what hides a wait for counts: Inductor computes pointwise values where an operator first takes them, which for
rows is the exchange behind the wait. Matrix products stay where they stand, so other waits need none of it.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext
from hecate.passes.final.collective_notes import write_note
from hecate.passes.final.in_flight import in_flight
from hecate.passes.final.node_cost import Clock
from hecate.runtime.comm.collective import start_of


def order_collectives(gm: GraphModule, context: PassContext) -> Outcome:
    """Give every start the token of the one before."""
    clock = Clock(gm, context)
    nodes = list(gm.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    collectives = in_flight(nodes)
    # Seconds of compute up to each node; a collective is hidden by the compute between its start and its wait.
    seconds = list(accumulate(map(clock.seconds, nodes), initial=0.0))
    before: Node | None = None
    for one in collectives:
        *args, _, _ = one.start.args
        behind = seconds[position[one.wait]] - seconds[position[one.start]]
        sent = clock.sent_bytes(one.start, one.wait)
        note = write_note(one.start, context, clock.link_seconds(one.start, one.wait), behind, sent)
        one.start.args = (*args, [before] if before is not None else [], note)
        if one.collective.carries == "counts":
            *args, _ = one.wait.args
            between = nodes[position[one.start] + 1 : position[one.wait]]
            # Sizes are numbers of the host where lengths vary.
            tensors = (node for node in between if isinstance(node.meta.get("val"), torch.Tensor))
            one.wait.args = (*args, [node for node in tensors if any(start_of(user.target) for user in node.users)])
        before = one.start
    return Outcome(rewritten=len(collectives))
