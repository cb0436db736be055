"""exchange_rows: move tokens to the experts' holders instead of gathering the experts.

Needs    hecate.grouped_mm on gathered experts, rows sorted by expert (see ``find_region``).
Changes  w = gather(shard)                          placement, replicas = place(...)
         y = f(rows, w, offsets)         becomes    own, w' = hold(shards, sparse_all_gather(shards, replicas))
                                                    offsets', ticket = route(gather_counts(offsets), placement)
                                                    y' = f'(exchange(rows, ticket), own, w', offsets')
                                                    y = exchange_back(y', ticket)
         where f' is f, the model's own matmuls and activations, with two operands instead of one: a rank's own
         experts, in place, and its replicas. What f does to a parameter is done to both. A policy without replicas
         reads its slots with own_experts, and f stays as it is; one that calibrates may add replicas after the
         counts are known.

         With ``Config(chunks=n)`` the rows of a layer are cut into n parts that travel and are computed one after the
         other, so that one part travels while another is computed; counts, placement and route are made once.
         With ``Config(dispatch="nodes")`` a token's row crosses to each node once, where that is proven right (see
         ``node_rows``); what results are multiplied with before they are summed is then done where they are made.
         A layer that is called several times has its slots filled once, and a route for each call.
         Where a rank has bounded room for rows (``context.room_percent``) it gets a fixed number of them, with those
         that came in front, and no size depends on data but that of the slots.
Never    touches routing, weights, combine, shared experts or auxiliary losses; bakes in who holds what.

At one rank there is nobody to exchange with: the experts are read in place and the rows are only counted.
Every other region falls back to the gather, with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.choose_dispatch import Way, how_rows_travel
from hecate.passes.analysis.find_region import Region, find_regions
from hecate.passes.analysis.node_rows import NodeRows
from hecate.passes.analysis.torch_values import ONE_GRAD_MODE, GraphFacts, gathers_by_layer, value_of
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.captured.copy_body import copy_body, copy_node
from hecate.passes.fx import Builder, arg, computed_from, erase_unused, skip_of, take_place
from hecate.runtime.ops.experts import hold, own_experts
from hecate.runtime.ops.node_ticket import NODE_TICKET_PARTS
from hecate.runtime.ops.ticket import TICKET_PARTS


def exchange_rows(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the region of every layer in ``gm``."""
    rewritten, skipped, facts = 0, [], GraphFacts(gm.graph)
    for layer, gathers in gathers_by_layer(gm.graph).items():
        try:
            regions = find_regions(facts, layer, gathers)
            if context.world_size > 1 and context.replicates:
                _check_same_mode(facts, regions, context)
        except Refused as reason:
            # A gather itself stands at no line of the model's code.
            users = sorted({user for gather in gathers for user in gather.users})
            skipped.append(skip_of(context.name(layer), reason, *users))
            continue
        ways = [how_rows_travel(facts, region, context) for region in regions]
        skipped += dict.fromkeys(skip for way in ways for skip in way.skipped)
        _rewrite(ways, context)
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _check_same_mode(facts: GraphFacts, regions: Sequence[Region], context: PassContext) -> None:
    """Check that all experts of a layer, which travel in one operation, are read with gradients, or all without."""
    modes, gathers = facts.grad_modes, _gathers_of(regions)
    if len({modes[gather] for gather in gathers}) != 1:
        raise Refused("some of the experts' parameters are read with gradients and some without", fix=ONE_GRAD_MODE)
    # Replicas that calibrate adds are gathered where the rows have been counted.
    if context.calibrates and any(modes[region.offsets] != modes[gathers[0]] for region in regions):
        raise Refused("rows are counted without gradients", fix="Config(calibrate=False)")


def _gathers_of(regions: Sequence[Region]) -> list[Node]:
    """Return the expert parameters of a layer, in graph order."""
    return sorted({gather for region in regions for gather in region.gathers})


def _rewrite(ways: Sequence[Way], context: PassContext) -> None:
    """Put the bodies onto this rank's slots and onto the rows that are exchanged for them."""
    regions = [way.region for way in ways]
    if context.world_size == 1:
        # All experts are here, and rows are only counted.
        for region in regions:
            new: dict[Node, Node] = {}
            for gather in region.gathers:
                here = Builder(gather.graph, before=gather, layer=region.layer)
                new[gather] = here.call(own_experts, arg(gather, 0), 1)
            here = Builder(region.offsets.graph, after=region.offsets, layer=region.layer)
            new[region.offsets] = here.call(torch.ops.hecate.count_rows.default, region.offsets, region.layer)
            copy_body(region, context, new, {})
            _replace(region, new)
        return
    gathers = _gathers_of(regions)
    slots = _fill_slots(gathers, regions[0].layer, context)
    for way in ways:
        # Replicas that calibrate adds are those of one call.
        _rewrite_call(way, gathers, replace(slots), context)


def _rewrite_call(way: Way, gathers: Sequence[Node], slots: _Slots, context: PassContext) -> None:
    """Rewrite one call on the layer's slots, which stand for ``gathers``."""
    region = way.region
    tickets = _route(region, context, slots, way.chunks)
    new = dict(zip(gathers, slots.own, strict=True))
    replicas = dict(zip(gathers, slots.replicas, strict=False))
    if way.chunks > 1:
        _replace(region, _compute_chunks(region, tickets, new, replicas))
        return
    (ticket,) = tickets
    if way.nodes is not None:
        ticket = _route_nodes(way.nodes, ticket)
    _exchange(region, ticket, new, alone=way.nodes.weights if way.nodes is not None else ())
    copy_body(region, context, new, replicas)
    _replace(region, {exit: _send_back(region, new[exit], ticket) for exit in region.exits})


@dataclass(frozen=True, kw_only=True)
class _Ticket:
    """The nodes of one chunk's ticket."""

    offsets: Node
    # splits, send and receive index; by_node has a middle index before the last, where rows cross to each node once
    rest: tuple[Node, ...]
    by_node: tuple[Node, ...] = ()
    counts: Node
    placement: Node


@dataclass(kw_only=True)
class _Slots:
    """Nodes of a rank's slots of a layer: own shards and their views, and replicas (none for some policies)."""

    placement: Node
    held: Node
    shards: list[Node]
    own: list[Node]
    replicas: list[Node]


def _fill_slots(gathers: Sequence[Node], layer: int, context: PassContext) -> _Slots:
    """Make the parameters this rank's slots; the placement is taken where the first of them is read."""
    hecate, first = torch.ops.hecate, gathers[0]
    graph = first.graph
    here = Builder(graph, before=first, layer=layer)
    shards = [_read_early(arg(gather, 0), first, here) for gather in gathers]
    placement, held = here.parts(here.call(hecate.place.default, shards[0], layer), 2)
    if not context.replicates:
        # Owners alone hold experts: each parameter's slots are its shard, read where the parameter was.
        own = [
            Builder(graph, before=gather, layer=layer).call(own_experts, arg(gather, 0), context.world_size)
            for gather in gathers
        ]
        return _Slots(placement=placement, held=held, shards=shards, own=own, replicas=[])
    gathered = here.call(hecate.sparse_all_gather.default, shards, placement, held, layer)
    slots = _Slots(
        placement=placement, held=held, shards=shards, own=shards, replicas=here.parts(gathered, len(shards))
    )
    if not context.calibrates:
        _hold(slots, here, layer)
    return slots


def _read_early(shard: Node, first: Node, here: Builder) -> Node:
    """Return a parameter as it is read, cast and viewed for a gather, from where ``first`` stands or before."""
    if shard < first:
        return shard
    # Parameters are there from the start.
    return here.copy(shard, {source: _read_early(source, first, here) for source in shard.all_input_nodes})


def _hold(slots: _Slots, here: Builder, layer: int) -> None:
    """Let gradients of own experts and replicas go to the owners from here on."""
    held = here.call(hold, layer, slots.placement, *slots.shards, *slots.replicas)
    parts = here.parts(held, 2 * len(slots.shards))
    slots.own, slots.replicas = parts[: len(slots.shards)], parts[len(slots.shards) :]


def _route(region: Region, context: PassContext, slots: _Slots, chunks: int) -> list[_Ticket]:
    """Write the tickets that say where each row goes, for every chunk."""
    hecate, graph = torch.ops.hecate, region.offsets.graph
    # Step 1: who has how many rows. The route needs the number of slots, which is known before their contents have
    # come. Own experts that are read later than the first matmul do not delay it.
    needed = slots.replicas if context.calibrates else [slots.held] if context.replicates else slots.own[:1]
    here = Builder(graph, after=max(region.offsets, *needed), layer=region.layer)
    counts = here.call(hecate.gather_counts.default, region.offsets, slots.placement, region.layer)

    # Step 2: perhaps more replicas, now that the rows are known.
    if context.calibrates:
        before = slots.placement
        calibrated = here.call(hecate.calibrate.default, counts, before, region.layer)
        slots.placement, slots.held = here.parts(calibrated, 2)
        beside = Builder(graph, after=here.last, layer=region.layer)
        more = beside.call(
            hecate.top_up.default, slots.shards, slots.replicas, before, slots.placement, slots.held, region.layer
        )
        slots.replicas = beside.parts(more, len(slots.shards))
        _hold(slots, beside, region.layer)

    # Step 3: where each row goes. How many may come is told from the entry that is there first, which is above all
    # uses of the others.
    rows: Node | int = 0
    if context.room_percent:
        entry = min(region.entries)
        here = Builder(graph, after=max(here.last, entry), layer=region.layer)
        rows = here.length(entry)
    size = here.length(slots.shards[0])
    if context.replicates:
        size = here.call(operator.add, size, here.length(slots.held))
    route = here.call(hecate.route.default, counts, slots.placement, region.offsets, size, rows, chunks, region.layer)
    parts = here.parts(route, TICKET_PARTS * chunks)
    tickets = []
    for chunk in range(chunks):
        offsets, *rest = parts[TICKET_PARTS * chunk :][:TICKET_PARTS]
        tickets.append(_Ticket(offsets=offsets, rest=tuple(rest), counts=counts, placement=slots.placement))
    return tickets


def _route_nodes(nodes: NodeRows, ticket: _Ticket) -> _Ticket:
    """Add to a ticket the rows that relays pass on."""
    region = nodes.region
    here = Builder(region.offsets.graph, after=max(*ticket.rest, *nodes.tokens), layer=region.layer)
    pieces = []
    for index in nodes.tokens:
        is_mask = value_of(index) is not None and value_of(index).dtype == torch.bool
        pieces.append(here.method("squeeze", here.method("nonzero", index), 1) if is_mask else index)
    tokens = pieces[0] if len(pieces) == 1 else here.call(torch.cat, pieces)
    route = torch.ops.hecate.route_nodes.default
    parts = here.call(route, tokens, ticket.counts, ticket.placement, *ticket.rest, nodes.choices, region.layer)
    return replace(ticket, by_node=tuple(here.parts(parts, NODE_TICKET_PARTS)))


def _exchange(
    region: Region,
    ticket: _Ticket,
    new: dict[Node, Node],
    here: Builder | None = None,
    *,
    alone: Sequence[Node] = (),
) -> None:
    """Exchange rows and what is looked up by expert, at ``here`` or where rows are first used, in that grad mode.

    Entries in ``alone`` travel each row by itself, even if others cross to nodes.
    """
    hecate, graph, body = torch.ops.hecate, region.offsets.graph, set(region.body)
    for entry in region.entries:
        user = min(user for user in entry.users if user in body)
        at = here if here is not None else Builder(graph, before=user, layer=region.layer)
        if ticket.by_node and entry not in alone:
            new[entry] = at.call(hecate.exchange_nodes.default, entry, *ticket.by_node, region.layer)
        else:
            new[entry] = at.call(hecate.exchange.default, entry, *ticket.rest, region.layer)
    new[region.offsets] = ticket.offsets
    if region.ids is not None:
        at = here if here is not None else Builder(graph, after=max(ticket.offsets, *ticket.rest), layer=region.layer)
        new[region.ids] = at.call(hecate.row_slots.default, ticket.offsets, at.length(ticket.rest[-1]))


def _compute_chunks(
    region: Region, tickets: list[_Ticket], new: dict[Node, Node], replicas: dict[Node, Node]
) -> dict[Node, Node]:
    """Write the body behind the old one, chunk by chunk, and return the sums of the chunks' results."""
    here = Builder(region.offsets.graph, after=region.body[-1], layer=region.layer)
    # Nodes on parameters alone are computed once.
    made = computed_from(region.gathers)
    for node in region.body:
        if node in made:
            copy_node(node, region, here, new, replicas)
    chunks = []
    for ticket in tickets:
        chunks.append(dict(new))
        _exchange(region, ticket, chunks[-1], here)
    results: dict[Node, Node] = {}
    for ticket, of_chunk in zip(tickets, chunks, strict=True):
        for node in region.body:
            if node not in made:
                copy_node(node, region, here, of_chunk, replicas)
        for exit in region.exits:
            back = _send_back(region, of_chunk[exit], ticket)
            here.last = max(here.last, back)
            # Each row is in one chunk; in the others it is zero.
            results[exit] = here.call(operator.add, results[exit], back) if exit in results else back
    return results


def _send_back(region: Region, result: Node, ticket: _Ticket) -> Node:
    """Send a result back to its rows' ranks."""
    here = Builder(result.graph, after=result, layer=region.layer)
    rows = here.length(region.entries[0])
    hecate = torch.ops.hecate
    back = hecate.exchange_nodes_back.default if ticket.by_node else hecate.exchange_back.default
    return here.call(back, result, *(ticket.by_node or ticket.rest), rows, region.layer)


def _replace(region: Region, results: dict[Node, Node]) -> None:
    """Use results in place of the exits, and remove unused nodes."""
    body = set(region.body)
    for exit in region.exits:
        take_place(exit, results[exit], unless=body.__contains__)
    erase_unused((*region.gathers, *region.body))
