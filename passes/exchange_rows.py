"""exchange_rows: move tokens to the experts' owners instead of gathering the experts.

Needs    hecate.grouped_mm on gathered experts, rows sorted by expert (see ``regions``).
Changes  w = gather(shard)                          slots = own_experts(shard)
         y = f(rows, w, offsets)         becomes    offsets', ticket = route(offsets, ...)
                                                    y' = f(exchange(rows, ticket), slots, offsets')
                                                    y = exchange_back(y', ticket)
         where f, the model's own matmuls and activations, stays as it is.
Never    touches routing, weights, combine, shared experts or auxiliary losses; bakes in who owns what.

At one rank there is nobody to exchange with: the experts are read in place and the rows are only counted.
Every other region falls back to the gather, with the reason.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from hecate.passes.contract import Outcome, PassContext, Refused, Skip
from hecate.passes.nodes import arg, gathers_by_layer, positions
from hecate.passes.regions import Region, find_region
from hecate.runtime.ops import own_experts


def exchange_rows(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the region of every layer in ``gm``."""
    rewritten, skipped = 0, []
    for layer, gathers in gathers_by_layer(gm.graph).items():
        try:
            region = find_region(gm.graph, layer, gathers)
        except Refused as reason:
            skipped.append(Skip(where=context.name(layer), reason=str(reason)))
            continue
        _rewrite(gm.graph, region, context.world_size)
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _rewrite(graph: Graph, region: Region, world_size: int) -> None:
    """Copy the body onto exchanged rows, then remove what nobody uses any more."""
    new: dict[Node, Node] = {}

    # Step 1: the parameters become this rank's slots.
    for gather in region.gathers:
        with graph.inserting_before(gather):
            new[gather] = graph.call_function(own_experts, (arg(gather, 0), world_size))

    # Step 2: rows and offsets, as they are at one rank, exchanged at more.
    if world_size == 1:
        with graph.inserting_after(region.offsets):
            counted = torch.ops.hecate.count_rows.default
            new[region.offsets] = graph.call_function(counted, (region.offsets, region.layer))
        ticket: list[Node] = []
    else:
        ticket = _exchange(graph, region, new)

    # Step 3: the body, unchanged, on the new values. A lookup by id waits for its first user, because the
    # ids of exchanged rows may be known later than those of the original rows.
    place = positions(graph)
    for node in region.body:
        spot = min(node.users, key=place.__getitem__) if node in region.lookups else node
        with graph.inserting_before(spot):
            copy = graph.node_copy(node, lambda n: new.get(n, n))
        if world_size > 1:
            copy.meta.pop("example_value", None)
        copy.meta["hecate_layer"] = region.layer
        new[node] = copy

    # Step 4: results go home.
    body = set(region.body)
    for exit in region.exits:
        result = new[exit]
        if world_size > 1:
            with graph.inserting_after(new[exit]):
                rows = _num_rows(graph, region.entries[0])
            with graph.inserting_after(rows):
                result = graph.call_function(
                    torch.ops.hecate.exchange_back.default, (new[exit], *ticket, rows, region.layer)
                )
            if "example_value" in exit.meta:
                result.meta["example_value"] = exit.meta["example_value"]
        exit.replace_all_uses_with(result, delete_user_cb=lambda user: user not in body)
    for node in reversed((*region.gathers, *region.body)):
        if not node.users:
            graph.erase_node(node)


def _exchange(graph: Graph, region: Region, new: dict[Node, Node]) -> list[Node]:
    """Insert route and one exchange per entry; returns the ticket: splits, send and receive index."""
    place = positions(graph)
    latest = max((region.offsets, region.gathers[0]), key=place.__getitem__)
    with graph.inserting_after(latest):
        slots = graph.call_function(torch.ops.aten.sym_size.int, (region.gathers[0].args[0], 0))
    with graph.inserting_after(slots):
        route = graph.call_function(torch.ops.hecate.route.default, (region.offsets, slots, region.layer))
    parts: list[Node] = []
    for index in range(4):
        with graph.inserting_after(parts[-1] if parts else route):
            parts.append(graph.call_function(operator.getitem, (route, index)))
    new[region.offsets], *ticket = parts
    body = set(region.body)
    for entry in region.entries:
        # Where the rows are first used: in its grad mode, and after whatever happened to them before.
        first = min((user for user in entry.users if user in body), key=place.__getitem__)
        with graph.inserting_before(first):
            new[entry] = graph.call_function(torch.ops.hecate.exchange.default, (entry, *ticket, region.layer))
    if region.ids is not None:
        with graph.inserting_after(parts[-1]):
            rows = _num_rows(graph, ticket[2])
        with graph.inserting_after(rows):
            new[region.ids] = graph.call_function(torch.ops.hecate.row_slots.default, (new[region.offsets], rows))
    return ticket


def _num_rows(graph: Graph, rows: Node) -> Node:
    return graph.call_function(torch.ops.aten.sym_size.int, (rows, 0))
