"""Copies of a region's body, on a rank's own experts and its replicas, and on the rows that came for them."""

from __future__ import annotations

import torch
from torch.fx import Node

from hecate.passes.analysis.find_region import Region
from hecate.passes.base import PassContext
from hecate.passes.fx import BODY_OF, Builder, arg, calls, copy_place


def copy_body(region: Region, context: PassContext, new: dict[Node, Node], replicas: dict[Node, Node]) -> None:
    """Copy the body, to compute on the new values.

    ``replicas`` has nodes of parameters alone as copied for the replicas, ``new`` those for the own experts.
    A lookup by id waits for its first user, because ids of exchanged rows may be known later than those of rows.
    """
    for node in region.body:
        spot = min(node.users) if node in region.lookups else node
        # A calibrated layer has its slots later than the parameters were read.
        sources = [known[source] for source in node.all_input_nodes for known in (new, replicas) if source in known]
        last = max(sources, default=spot)
        here = Builder(node.graph, before=spot if last <= spot else last.next, layer=region.layer)
        padded, travelled = context.room_percent > 0, context.world_size > 1
        filled = not padded if travelled else None
        copy_node(node, region, here, new, replicas, padded=padded, filled=filled)


def copy_node(
    node: Node,
    region: Region,
    here: Builder,
    new: dict[Node, Node],
    replicas: dict[Node, Node],
    *,
    padded: bool = False,
    filled: bool | None = True,
) -> None:
    """Copy one node of the body, on own experts and replicas; the layer is noted on all nodes that this takes."""
    made: list[Node] = []
    if node in region.lookups:
        # The table is small, a bias.
        table = arg(node, 0)
        if table in replicas:
            made.append(here.call(torch.cat, [new[table], replicas[table]]))
        if padded:
            made += _with_zeros(made[-1] if made else new[table], here)
        new[node] = here.copy(node, new | {table: made[-1]} if made else new)
    elif calls(node, torch.ops.hecate.grouped_mm):
        new[node] = _product(node, here, new, replicas, filled=filled)
    else:
        if any(source in replicas for source in node.all_input_nodes):
            replicas[node] = here.copy(node, new | replicas)
            made.append(replicas[node])
        new[node] = here.copy(node, new)
    for copy in (*made, new[node]):
        copy.meta[BODY_OF] = region.layer


def _product(
    node: Node, here: Builder, new: dict[Node, Node], replicas: dict[Node, Node], *, filled: bool | None
) -> Node:
    """Multiply rows with own experts, and with replicas if there may be some."""
    hecate, (x, w, offsets) = torch.ops.hecate, (arg(node, index) for index in range(3))
    rows, own, ends = new.get(x, x), new.get(w, w), new.get(offsets, offsets)
    said = node.args[3:] if filled is None else (True,) if filled else ()
    if w in replicas:
        made = here.call(hecate.grouped_mm_pair.default, rows, own, replicas[w], ends, *said)
    else:
        made = here.call(hecate.grouped_mm.default, rows, own, ends, *said)
    copy_place(node, made)
    return made


def _with_zeros(table: Node, here: Builder) -> list[Node]:
    """Append a line of zeros to ``table``, for rows of no slot; there may be no slots at all."""
    last = here.method("movedim", table, 0, -1)
    padded = here.call(torch.nn.functional.pad, last, (0, 1))
    return [last, padded, here.method("movedim", padded, -1, 0)]
