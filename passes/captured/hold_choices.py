"""hold_choices: experts that routers choose are recorded, or come from outside.

Needs    a forward in which choices are held (``context.held``), and scores [..., E] of a layer's experts of which a
         topk, max or argmax along the last dimension chooses, upstream of what is done with the layer's experts; or a
         table of experts [n, k], a buffer or parameter of integers, in which tokens are looked up.
Changes  top, ids = topk(scores, k)   becomes   ids = hold_choices(topk(scores, k)[1]); top = gather(scores, -1, ids)
         for each operation by which the layer's router chooses; together they have a token's experts. Of an argmax
         the largest score, max(scores)[0], becomes that of the held expert.
         Where a module has its experts in several, these have one router (``router_of``).
         Where scores were masked before the choice, as those of other groups are, weights of experts that the router
         has not chosen itself are from before the mask.
Never    touches a graph where nothing is held; choices of tokens by experts; scores, or what is done with them: so
         weights are the model's own, at the experts that came from outside, and gradients flow through them.

A layer whose router chooses in another way is skipped, and the forward then ends with its name.

Source: routing replay, as reinforcement learning needs it where other code made the rollout (R2 and R3).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hecate.passes.analysis.choice_weights import largest_scores_of, refuse_kept_scores, unmasked
from hecate.passes.analysis.choices import Choice, choice_of, lookup_of, of_router
from hecate.passes.analysis.torch_values import name_in_model, shape_of
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import (
    Builder,
    arg,
    calls,
    closure_forward,
    line_of,
    reached,
    skip_of,
    take_place,
)


def hold_choices(gm: GraphModule, context: PassContext) -> Outcome:
    """Hold what the router of every layer in ``gm`` chooses."""
    if not context.held:
        return Outcome()
    operations = (choice_of(node) or lookup_of(node) for node in gm.graph.nodes)
    choices = [choice for choice in operations if choice is not None and of_router(choice)]
    free, rewritten, skipped = set(choices), 0, []
    routers = router_of({context.name(layer): experts for layer, experts in context.held.items()})
    for layer, uses in _uses_of_layers(gm.graph).items():
        name = context.name(layer)
        among = [choice for choice in choices if choice in free and choice.among in (0, context.held[layer])]
        nearest = _nearest(_chosen_for(uses, among), name)
        free -= {*nearest}
        try:
            left = [choice for choice in choices if choice in free]
            found = _calls_of_layer(nearest, left, uses, follows=routers[name] != name)
        except Refused as refused:
            skipped.append(skip_of(name, refused, uses[0], fallback=False))
            continue
        for number, call in enumerate(found):
            _hold(call, layer, number)
            free -= {*call}
        rewritten += bool(found)
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _calls_of_layer(
    nearest: list[Choice], free: list[Choice], uses: list[Node], *, follows: bool
) -> list[list[Choice]]:
    """Return the choices of each call of a layer, whose first makes the ``nearest``. Raises Refused.

    There are none if the layer ``follows``: its rows go with those of other experts in its module.
    """
    if follows and nearest:
        raise Refused("it has a router of its own, in one module with other experts", nearest[0].node)
    if follows:
        return []
    if not nearest:
        raise Refused(
            "in the graph that has them, no topk, max or argmax over the scores of all experts leads to what they "
            "compute"
        )
    refuse_kept_scores(nearest, uses)
    # Where the layer is called again, its router chooses in the same places.
    places, each = {_place(choice.node) for choice in nearest}, len(nearest)
    again = [choice for choice in free if _place(choice.node) in places]
    found = [nearest, *(again[begin : begin + each] for begin in range(0, len(again), each))]
    counted = (torch.ops.hecate.gather_counts, torch.ops.hecate.count_rows)
    if sum(calls(node, *counted) for node in uses) > len(found):
        raise Refused("it is called several times in one forward, by choices in several places", nearest[0].node)
    return found


def router_of(layers: Mapping[str, int]) -> dict[str, str]:
    """Return by whose choice rows go to each of ``layers``, given with their numbers of experts.

    Of equally many experts in one module that is no list, all go by the first's.

    >>> router_of({"layers.0.moe.up": 8, "layers.0.moe.down": 8, "blocks.0": 8, "blocks.1": 8})
    {'layers.0.moe.up': 'layers.0.moe.up', 'layers.0.moe.down': 'layers.0.moe.up', 'blocks.0': 'blocks.0', \
'blocks.1': 'blocks.1'}
    """
    first: dict[tuple[str, int], str] = {}
    found = {}
    for name, experts in layers.items():
        around, _, own = name.rpartition(".")
        found[name] = name if own.isdigit() else first.setdefault((around, experts), name)
    return found


def _uses_of_layers(graph: Graph) -> dict[int, list[Node]]:
    """Return what is done with each layer's experts, layers in the order in which that begins."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if calls(node, torch.ops.hecate.gather_experts):
            found.setdefault(int(arg(node, 2)), []).extend(sorted(closure_forward([node])))
        elif type(layer := node.meta.get("custom", {}).get("hecate_in")) is int:
            found.setdefault(layer, []).append(node)
    return found


def _chosen_for(uses: Iterable[Node], choices: list[Choice]) -> list[Choice]:
    """Return the choices on which the first of ``uses`` depends that depends on any."""
    uses = {*uses}
    # A router chooses before experts compute.
    before = [choice for choice in choices if choice.node not in uses]
    first = uses & closure_forward(place for choice in before for place in choice.places)
    if not first:
        return []
    # What only leads to another choice, such as a mask of its scores, is no part of what is chosen.
    ends = {choice.node for choice in before}
    upstream = reached([min(first)], lambda node: [] if node in ends else node.all_input_nodes)
    return [choice for choice in before if any(place in upstream for place in choice.places)]


def _nearest(choices: list[Choice], experts: str) -> list[Choice]:
    """Return those of ``choices`` that are made in the modules around ``experts``, as near to these as any."""
    shared = {choice: _shared_modules(choice.node, experts) for choice in choices}
    return [choice for choice in choices if shared[choice] == max(shared.values())]


def _module_of(node: Node) -> str:
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    return name_in_model(str(stack[-1][0])) if stack else ""


def _place(node: Node) -> tuple[Any, ...]:
    """Return what an operation has in common with itself in another call of its module."""
    line = line_of(node)
    return (_module_of(node), str(line)) if line is not None else (node,)


def _shared_modules(node: Node, name: str) -> int:
    """Return how many modules around a node are also around the module ``name``."""
    parts = [part.strip("'\"") for part in _module_of(node).replace("[", ".").replace("]", "").split(".")]
    shared = 0
    for one, other in zip(parts, name.split("."), strict=False):
        if one != other:
            break
        shared += 1
    return shared


def _hold(choices: list[Choice], layer: int, call: int) -> None:
    total, first = sum(choice.count for choice in choices), 0
    for choice in choices:
        node = choice.node
        largest_scores = largest_scores_of(choice)
        if choice.scores is not None and any(largest < node for largest in largest_scores):
            choice.scores.append(node)
        users = list(node.users)
        here = Builder(node.graph, after=node, layer=layer, like=node)
        ids = here.call(operator.getitem, node, 1) if choice.has_values else node
        # Tables may have an expert twice in a line.
        differ = choice.scores is not None
        part = (first, choice.count, total, differ, call)
        held = here.call(torch.ops.hecate.hold_choices.default, ids, *part, layer)
        if not choice.has_values:
            take_place(node, held, unless=partial(operator.is_, held))
        for user in users if choice.has_values else ():
            if arg(user, 1) == 1:
                take_place(user, held)
            else:
                take_place(user, _scores_of(choice, ids, held, here, keeps_dim=choice.keeps_dim))
            node.graph.erase_node(user)
        for largest in largest_scores:
            take_place(largest, _scores_of(choice, ids, held, here, keeps_dim=shape_of(largest) != shape_of(held)))
        first += choice.count


def _scores_of(choice: Choice, own: Node, held: Node, here: Builder, *, keeps_dim: bool) -> Node:
    """Write the scores of held choices, with the last dimension or without it.

    Args:
        own: what the router has chosen itself, which may be masked where it had no more to choose.
    """
    assert choice.scores is not None, "a lookup has no values"
    places = held if choice.keeps_dim else here.method("unsqueeze", held, -1)
    found = here.call(torch.gather, choice.scores, -1, places)
    before = unmasked(choice.scores)
    if before is not choice.scores:
        same = here.call(operator.eq, places, own if choice.keeps_dim else here.method("unsqueeze", own, -1))
        found = here.call(torch.where, same, found, here.call(torch.gather, before, -1, places))
    return found if keeps_dim else here.method("squeeze", found, -1)
