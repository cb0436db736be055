"""split_collectives: start a collective in one place, wait for it in another.

Needs    collectives (``hecate.runtime.comm.collective``) in a forward or backward graph.
Changes  y = f(x)   becomes   token = f_start(x, [], note); y = f_wait(token, x', [])
         where x' has the dtype, device and width of x and no rows: a start copies what it sends, so that x itself
         need not be kept for the wait. One x' serves all waits of a graph for which it would be the same.
Never    moves anything: both halves stand where the collective stood.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from hecate.passes.base import Outcome, PassContext
from hecate.passes.final.collective_notes import write_note
from hecate.passes.fx import Builder, arguments_of, take_place
from hecate.runtime.comm.collective import whole_of

# Tensors without lines, by dtype, device and shape of a line.
StandIns = dict[tuple[torch.dtype, torch.device, tuple[int, ...]], Node]


def split_collectives(gm: GraphModule, context: PassContext) -> Outcome:
    """Replace every collective by its two halves."""
    graph, count = gm.graph, 0
    stand_ins: StandIns = {}
    for node in list(graph.nodes):
        collective = whole_of(node.target) if node.op == "call_function" else None
        if collective is None:
            continue
        args, here = list(arguments_of(node).values()), Builder(graph, before=node)
        shapes = args if collective.wait_needs_arguments else map_arg(args, _stand_in(here, stand_ins))
        start = here.call(collective.start, *args, [], write_note(node, context))
        here.like = node
        wait = here.call(collective.wait, start, *shapes, [])
        take_place(node, wait)
        graph.erase_node(node)
        count += 1
    return Outcome(rewritten=count)


def _stand_in(here: Builder, known: StandIns) -> Callable[[Node], Node]:
    """Return a function from rows or parameters to a tensor without rows, from which a wait tells sizes."""

    def stand_in(value: Node) -> Node:
        tensor = value.meta.get("val")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() == 0:
            return value
        shape = tensor.shape[1:]
        if not all(isinstance(size, int) for size in shape):
            return value
        alike = tensor.dtype, tensor.device, tuple(shape)
        if alike not in known:
            known[alike] = here.call(torch.ops.aten.new_empty.default, value, [0, *shape])
        return known[alike]

    return stand_in
