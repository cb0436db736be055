"""exchange_rows: move tokens to the experts' holders instead of gathering the experts.

Needs    hecate.grouped_mm on gathered experts, rows sorted by expert (see ``regions``).
Changes  w = gather(shard)                          placement, slots = place(...)
         y = f(rows, w, offsets)         becomes    w' = sparse_all_gather(shards, placement, slots)
                                                    offsets', ticket = route(gather_counts(offsets), placement)
                                                    y' = f(exchange(rows, ticket), w', offsets')
                                                    y = exchange_back(y', ticket)
         where f, the model's own matmuls and activations, stays as it is. A policy without replicas reads its
         slots with own_experts, which costs nothing; one that calibrates may add slots after the counts are known.
Never    touches routing, weights, combine, shared experts or auxiliary losses; bakes in who holds what.

At one rank there is nobody to exchange with: the experts are read in place and the rows are only counted.
Every other region falls back to the gather, with the reason.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from hecate.passes.base import Outcome, PassContext, Refused, Skip
from hecate.passes.captured.find_region import Region, find_region
from hecate.passes.fx import arg, gathers_by_layer, grad_modes, positions
from hecate.runtime.ops import own_experts


def exchange_rows(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the region of every layer in ``gm``."""
    rewritten, skipped = 0, []
    for layer, gathers in gathers_by_layer(gm.graph).items():
        try:
            region = find_region(gm.graph, layer, gathers)
            if context.world_size > 1 and context.replicates:
                _check_same_mode(gm.graph, region, context)
        except Refused as reason:
            skipped.append(Skip(where=context.name(layer), reason=str(reason)))
            continue
        _rewrite(gm.graph, region, context)
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _check_same_mode(graph: Graph, region: Region, context: PassContext) -> None:
    """All experts of a layer travel in one operation, so they are read with gradients, or all without."""
    modes = grad_modes(graph)
    if len({modes[gather] for gather in region.gathers}) != 1:
        raise Refused("some of the experts' parameters are read with gradients and some without")
    # What calibrate adds is gathered where the rows have been counted.
    if context.calibrates and modes[region.offsets] != modes[region.gathers[0]]:
        raise Refused("rows are counted without gradients; calibrate=False avoids this")


def _rewrite(graph: Graph, region: Region, context: PassContext) -> None:
    """Copy the body onto exchanged rows, then remove what nobody uses any more."""
    new: dict[Node, Node] = {}
    world_size = context.world_size

    # Step 1: the parameters become this rank's slots.
    placement: Node | None = None
    held: Node | None = None
    shards: list[Node] = []
    if world_size > 1:
        placement, held, shards = _place(graph, region)
    if held is not None and context.replicates:
        with graph.inserting_after(held):
            gathered = graph.call_function(
                torch.ops.hecate.sparse_all_gather.default, (shards, placement, held, region.layer)
            )
        new.update(zip(region.gathers, _take_apart(graph, gathered, len(shards)), strict=True))
    else:
        for gather in region.gathers:
            with graph.inserting_before(gather):
                new[gather] = graph.call_function(own_experts, (arg(gather, 0), world_size))

    # Step 2: rows and offsets, as they are at one rank, exchanged at more.
    ticket: list[Node] = []
    if placement is None or held is None:
        with graph.inserting_after(region.offsets):
            counted = torch.ops.hecate.count_rows.default
            new[region.offsets] = graph.call_function(counted, (region.offsets, region.layer))
    else:
        ticket = _exchange(graph, region, context, new, placement, held, shards)

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


def _place(graph: Graph, region: Region) -> tuple[Node, Node, list[Node]]:
    """Insert ``place`` where the first expert parameter is read; returns its two results, and the shards by then."""
    place = positions(graph)
    first = min(region.gathers, key=place.__getitem__)
    shards = []
    with graph.inserting_before(first):
        for gather in region.gathers:
            shard = arg(gather, 0)
            if place[shard] > place[first]:
                # A cast of a parameter, which is there from the start.
                shard = graph.node_copy(shard)
            shards.append(shard)
        placed = graph.call_function(torch.ops.hecate.place.default, (shards[0], region.layer))
    placement, held = _take_apart(graph, placed, 2)
    return placement, held, shards


def _take_apart(graph: Graph, call: Node, count: int) -> list[Node]:
    parts: list[Node] = []
    for index in range(count):
        with graph.inserting_after(parts[-1] if parts else call):
            parts.append(graph.call_function(operator.getitem, (call, index)))
    return parts


def _exchange(
    graph: Graph,
    region: Region,
    context: PassContext,
    new: dict[Node, Node],
    placement: Node,
    held: Node,
    shards: list[Node],
) -> list[Node]:
    """Insert counts, route and one exchange per entry; returns the ticket: splits, send and receive index."""
    place = positions(graph)
    hecate = torch.ops.hecate
    # The route needs the number of slots, which is known before their contents have come. Own experts that are read
    # later than the first matmul do not delay it.
    read = [new[gather] for gather in region.gathers]
    needed = read if context.calibrates else [held] if context.replicates else read[:1]
    latest = max((region.offsets, *needed), key=place.__getitem__)
    with graph.inserting_after(latest):
        counts = latest = graph.call_function(hecate.gather_counts.default, (region.offsets, placement, region.layer))
    if context.calibrates:
        with graph.inserting_after(latest):
            calibrated = graph.call_function(hecate.calibrate.default, (counts, placement, region.layer))
        before = placement
        placement, held = _take_apart(graph, calibrated, 2)
        with graph.inserting_after(held):
            more = graph.call_function(hecate.top_up.default, (shards, read, before, placement, held, region.layer))
        new.update(zip(region.gathers, _take_apart(graph, more, len(read)), strict=True))
        latest = held
    with graph.inserting_after(latest):
        source = held if context.replicates else new[region.gathers[0]]
        slots = graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
    with graph.inserting_after(slots):
        route = graph.call_function(hecate.route.default, (counts, placement, region.offsets, slots, region.layer))
    new[region.offsets], *ticket = parts = _take_apart(graph, route, 4)
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
