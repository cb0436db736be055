"""write_choices: what is added to zeros at the places of a top-k is written there.

Needs    a joint graph with zeros.scatter_add(d, i, y), as autograd writes it for x.gather(d, i), on an accelerator,
         where i are the places that a top-k over d has found: scores of the experts that a token goes to.
Changes  zeros.scatter_add(d, i, y)   becomes   zeros.scatter(d, i, y)
Never    does so for other places, which may be equal.

Places of a top-k differ, so nothing is added to anything; but to add is atomic there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, arg, calls, is_getitem, option, take_place
from hecate.passes.joint.additions import adds_in_any_order, is_zeros, value_of

aten = torch.ops.aten


def write_choices(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every such addition in ``gm``."""
    count = 0
    for node in list(gm.graph.nodes):
        if not calls(node, aten.scatter_add) or not adds_in_any_order(value_of(node)):
            continue
        zeros, dimension, places, rows = node.args
        if is_zeros(zeros) and _are_found_along(places, dimension % value_of(node).dim()):
            here = Builder(gm.graph, before=node, like=node)
            written = here.call(aten.scatter.src, zeros, dimension, places, rows)
            take_place(node, written)
            gm.graph.erase_node(node)
            count += 1
    return Outcome(rewritten=count)


def _are_found_along(places: Any, dimension: int) -> bool:
    """Tell whether places are the second result of a top-k over ``dimension``."""
    if not is_getitem(places) or arg(places, 1) != 1 or not calls(arg(places, 0), aten.topk):
        return False
    return bool(option(arg(places, 0), 2, "dim", -1) % value_of(places).dim() == dimension)
