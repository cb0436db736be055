"""exchange_rows: move tokens to the experts' holders instead of gathering the experts.

Needs    hecate.grouped_mm on gathered experts, rows sorted by expert (see ``find_region``).
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

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext, Refused, Skip
from hecate.passes.captured.find_region import Region, find_region
from hecate.passes.captured.torch_values import GraphFacts, gathers_by_layer
from hecate.passes.fx import Builder, arg
from hecate.runtime.ops.experts import own_experts


def exchange_rows(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the region of every layer in ``gm``."""
    rewritten, skipped, facts = 0, [], GraphFacts(gm.graph)
    for layer, gathers in gathers_by_layer(gm.graph).items():
        try:
            region = find_region(facts, layer, gathers)
            if context.world_size > 1 and context.replicates:
                _check_same_mode(facts, region, context)
        except Refused as reason:
            skipped.append(Skip(where=context.name(layer), reason=str(reason)))
            continue
        _rewrite(region, context)
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _check_same_mode(facts: GraphFacts, region: Region, context: PassContext) -> None:
    """All experts of a layer travel in one operation, so they are read with gradients, or all without."""
    modes = facts.grad_modes
    if len({modes[gather] for gather in region.gathers}) != 1:
        raise Refused("some of the experts' parameters are read with gradients and some without")
    # What calibrate adds is gathered where the rows have been counted.
    if context.calibrates and modes[region.offsets] != modes[region.gathers[0]]:
        raise Refused("rows are counted without gradients; calibrate=False avoids this")


def _rewrite(region: Region, context: PassContext) -> None:
    """Put the body onto this rank's slots and onto the rows that are exchanged for them."""
    new: dict[Node, Node] = {}
    if context.world_size == 1:
        _read_in_place(region, new)
        ticket = None
    else:
        slots = _fill_slots(region, context, new)
        ticket = _exchange(region, context, slots, new)
    _copy_body(region, context, new)
    _return_rows(region, ticket, new)


def _read_in_place(region: Region, new: dict[Node, Node]) -> None:
    """At one rank all experts are here, and rows are only counted."""
    for gather in region.gathers:
        new[gather] = Builder(gather.graph, before=gather).call(own_experts, arg(gather, 0), 1)
    counted = Builder(region.offsets.graph, after=region.offsets)
    new[region.offsets] = counted.call(torch.ops.hecate.count_rows.default, region.offsets, region.layer)


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """What a rank holds of a layer, as nodes.

    Attributes:
        placement: who holds what.
        held: the experts in this rank's slots.
        shards: the parameters' own shards.
        contents: the parameters' slots, one for each gather of the region.
    """

    placement: Node
    held: Node
    shards: list[Node]
    contents: list[Node]


def _fill_slots(region: Region, context: PassContext, new: dict[Node, Node]) -> _Slots:
    """The parameters become this rank's slots; the placement is taken where the first of them is read."""
    hecate, graph = torch.ops.hecate, region.offsets.graph
    first = min(region.gathers)
    here = Builder(graph, before=first)
    shards = []
    for gather in region.gathers:
        shard = arg(gather, 0)
        # One that comes later is a cast of a parameter, which is there from the start.
        shards.append(here.copy(shard, {}) if shard > first else shard)
    placement, held = here.parts(here.call(hecate.place.default, shards[0], region.layer), 2)
    if context.replicates:
        gathered = here.call(hecate.sparse_all_gather.default, shards, placement, held, region.layer)
        contents = here.parts(gathered, len(shards))
    else:
        # Owners alone hold experts: each parameter's slots are its shard, read where the parameter was.
        contents = [
            Builder(graph, before=gather).call(own_experts, arg(gather, 0), context.world_size)
            for gather in region.gathers
        ]
    new.update(zip(region.gathers, contents, strict=True))
    return _Slots(placement=placement, held=held, shards=shards, contents=contents)


def _exchange(region: Region, context: PassContext, slots: _Slots, new: dict[Node, Node]) -> list[Node]:
    """Rows and offsets become those of the slots; returns the ticket: splits, send and receive index."""
    hecate, graph = torch.ops.hecate, region.offsets.graph
    # Step 1: who has how many rows. The route needs the number of slots, which is known before their contents have
    # come. Own experts that are read later than the first matmul do not delay it.
    needed = slots.contents if context.calibrates else [slots.held] if context.replicates else slots.contents[:1]
    here = Builder(graph, after=max(region.offsets, *needed))
    counts = here.call(hecate.gather_counts.default, region.offsets, slots.placement, region.layer)

    # Step 2: perhaps more slots, now that the rows are known.
    placement, held = slots.placement, slots.held
    if context.calibrates:
        calibrated = here.call(hecate.calibrate.default, counts, placement, region.layer)
        placement, held = here.parts(calibrated, 2)
        beside = Builder(graph, after=here.last)
        more = beside.call(
            hecate.top_up.default, slots.shards, slots.contents, slots.placement, placement, held, region.layer
        )
        new.update(zip(region.gathers, beside.parts(more, len(slots.contents)), strict=True))

    # Step 3: where each row goes.
    size = here.length(held if context.replicates else new[region.gathers[0]])
    route = here.call(hecate.route.default, counts, placement, region.offsets, size, region.layer)
    new[region.offsets], *ticket = here.parts(route, 4)

    # Step 4: the rows go there, and so does what is looked up by expert.
    body = set(region.body)
    for entry in region.entries:
        # Where the rows are first used: in its grad mode, and after whatever happened to them before.
        user = min(user for user in entry.users if user in body)
        new[entry] = Builder(graph, before=user).call(hecate.exchange.default, entry, *ticket, region.layer)
    if region.ids is not None:
        rows = here.length(ticket[2])
        new[region.ids] = here.call(hecate.row_slots.default, new[region.offsets], rows)
    return ticket


def _copy_body(region: Region, context: PassContext, new: dict[Node, Node]) -> None:
    """The body, unchanged, on the new values.

    A lookup by id waits for its first user, because the ids of exchanged rows may be known later than those of the
    original rows.
    """
    for node in region.body:
        spot = min(node.users) if node in region.lookups else node
        # What is calibrated has its slots later than the parameters were read.
        known = max((new[source] for source in node.all_input_nodes if source in new), default=spot)
        here = Builder(node.graph, before=spot) if known <= spot else Builder(node.graph, after=known)
        copy = new[node] = here.copy(node, new)
        if context.world_size > 1:
            copy.meta.pop("example_value", None)
        copy.meta["hecate_layer"] = region.layer


def _return_rows(region: Region, ticket: list[Node] | None, new: dict[Node, Node]) -> None:
    """Results go home, and what nobody uses any more is removed."""
    body, graph = set(region.body), region.offsets.graph
    for exit in region.exits:
        result = new[exit]
        if ticket is not None:
            here = Builder(graph, after=result)
            rows = here.length(region.entries[0])
            result = here.call(torch.ops.hecate.exchange_back.default, result, *ticket, rows, region.layer)
            if "example_value" in exit.meta:
                result.meta["example_value"] = exit.meta["example_value"]
        exit.replace_all_uses_with(result, delete_user_cb=lambda user: user not in body)
    for node in reversed((*region.gathers, *region.body)):
        if not node.users:
            graph.erase_node(node)
