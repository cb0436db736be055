"""split_collectives: start a collective in one place, wait for it in another.

Needs    operators of ``hecate.runtime.ops.registration.COLLECTIVES`` in a forward or backward graph.
Changes  y = f(x)   becomes   token = f_start(x, [], note); y = f_wait(token, x')
         where x' has the dtype, device and width of x and no rows: a start copies what it sends, so that x itself
         need not be kept for the wait.
Never    moves anything: both halves stand where the collective stood.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from hecate.passes.base import Outcome, PassContext
from hecate.passes.final.collective_notes import label
from hecate.passes.fx import arguments_of, fake_mode_of
from hecate.runtime.ops.registration import COLLECTIVES


def split_collectives(gm: GraphModule, context: PassContext) -> Outcome:
    """Replace every collective by its two halves."""
    graph, count = gm.graph, 0
    for node in list(graph.nodes):
        split = COLLECTIVES.get(node.target)
        if node.op != "call_function" or split is None:
            continue
        args = list(arguments_of(node).values())
        with graph.inserting_before(node):
            shapes = map_arg(args, _stand_in) if node.target not in _NEEDS_WHOLE else args
            start = graph.call_function(split.start, (*args, [], label(node, context)))
            wait = graph.call_function(split.wait, (start, *shapes))
        wait.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
        mode = fake_mode_of(gm)
        if mode is not None:
            with mode:
                start.meta["val"] = torch.empty(1, dtype=torch.int64)
        node.replace_all_uses_with(wait)
        graph.erase_node(node)
        count += 1
    return Outcome(rewritten=count)


# Its results are as long as its arguments.
_NEEDS_WHOLE = {torch.ops.hecate.average_gradients.default}


def _stand_in(value: Node) -> Node:
    """For rows and parameters, a tensor without rows from which the wait can tell its results; else the value."""
    tensor = value.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() == 0:
        return value
    shape = tensor.shape[1:]
    if not all(isinstance(size, int) for size in shape):
        return value
    empty = value.graph.call_function(torch.ops.aten.new_empty.default, (value, [0, *shape]))
    empty.meta["val"] = tensor.new_empty([0, *shape])
    return empty
