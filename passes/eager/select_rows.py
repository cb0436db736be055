"""select_rows: rows that are read by their numbers are copied as wholes.

Needs    reads that ``note_row_reads`` has noted, in a graph that runs node by node on a CPU.
Changes  x[numbers]   becomes   x.index_select(0, numbers)
Never    does so where a number may be negative: it counts from the end, which ``index_select`` may not.

The same values. ``x[numbers]`` goes from element to element, and takes three to nine times as long for rows of 32 to
96 numbers.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from hecate.passes.base import Outcome, PassContext
from hecate.passes.eager.note_row_reads import READS_ROWS
from hecate.passes.fx import arg, calls

aten = torch.ops.aten


def select_rows(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every noted read in ``gm``."""
    found = [node for node in gm.graph.nodes if node.meta.get(READS_ROWS) and calls(node, aten.index.Tensor)]
    for node in found:
        node.target, node.args = aten.index_select.default, (arg(node, 0), 0, arg(node, 1)[0])
    return Outcome(rewritten=len(found))
