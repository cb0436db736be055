"""group_expert_loops: a Python loop over experts becomes grouped matmuls over all of them.

Needs    gathered experts that are used one by one, w[0], w[1], ..., w[E-1], in the same way each, and each as often
         as the others (a loop over choices around it).
Changes  y0 = f(x0, w[0]); y1 = f(x1, w[1]); ...
         becomes   rows = cat([x0, x1, ...]); y = f'(rows, w, offsets); y0, y1, ... = split(y)
         where f' is f with every product by an expert's matrix as a grouped one. A layer that is called several
         times has such a computation for each call.
Never    touches how x0, x1, ... are chosen or how y0, y1, ... are combined, so it does not matter whether
         the model uses where, boolean masks or split.

The rows are then sorted by expert, which is what exchange_rows needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from hecate.passes.analysis.expert_loops import Loop, Turn, anchors_of, find_loops
from hecate.passes.analysis.expert_products import is_one_expert, is_transpose, matrix_operand
from hecate.passes.analysis.torch_values import GraphFacts, gathers_by_layer, shape_of, storage_of
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import Builder, arg, copy_place, erase_unused, operands, option, skip_of, take_place
from hecate.passes.match import named


def group_expert_loops(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the loop of every layer in ``gm``."""
    rewritten, skipped, facts = 0, [], GraphFacts(gm.graph)
    for layer, gathers in gathers_by_layer(gm.graph).items():
        gathers = [g for g in gathers if any(is_one_expert(user) for user in g.users)]
        if not gathers:
            continue
        try:
            loops = find_loops(facts, gathers, by_node=context.dispatch == "nodes" and context.nodes > 1)
            for loop in loops:
                _check_that_rows_are_less(loop, gathers, context)
        except Refused as reason:
            why = f"loop over experts: {reason}"
            skipped.append(skip_of(context.name(layer), reason, *gathers[0].users, reason=why))
            continue
        for loop in loops:
            # Nodes around a loop moved with the loop before it.
            _group(facts, Loop.of(loop.turns, loop.repeats))
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _check_that_rows_are_less(loop: Loop, gathers: Sequence[Node], context: PassContext) -> None:
    """Raise :class:`Refused` where every expert gets the same rows, and these are more than the experts.

    Rows travel there and back, in the forward and in the backward; experts in the forward, and their gradients.
    """
    first, other = loop.turns[0], loop.turns[-1]
    if first.entries != other.entries or context.world_size == 1:
        return
    row = sum(int(shape_of(node)[-1]) for node in (*first.entries, first.exit))
    expert = sum(prod(map(int, shape_of(gather)[1:])) for gather in gathers)
    if context.tokens * row > expert:
        raise Refused(
            f"every expert gets the same {context.tokens} rows, which take longer to travel than the experts do"
        )


def _group(facts: GraphFacts, loop: Loop) -> None:
    """Compute all turns in one, behind the last of their inputs."""
    first, here = loop.turns[0], Builder(facts.graph, after=loop.last)
    # Step 1: rows of all experts in expert order, and where each expert's rows end.
    entries = [[_in_front(here, entry, first.depth) for entry in turn.entries] for turn in loop.turns]
    sizes = [here.method("size", own[0], 0) for own in entries]
    of_experts = sizes[:: loop.repeats]
    for again in range(1, loop.repeats):
        of_experts = [
            here.call(operator.add, *pair) for pair in zip(of_experts, sizes[again :: loop.repeats], strict=True)
        ]
    offsets = here.call(torch.ops.hecate.sizes_to_offsets.default, of_experts, first.entries[0])
    new: dict[Node, Node] = {}
    for entry, parts_of_it in zip(first.entries, zip(*entries, strict=True), strict=True):
        new[entry] = here.call(torch.cat, list(parts_of_it))

    # Step 2: the first turn's computation, on all experts.

    @cache
    def ids() -> Node:
        """Write the expert of each row, where it is first needed."""
        return here.call(torch.ops.hecate.row_slots.default, offsets, here.method("size", new[first.entries[0]], 0))

    for view in first.views:
        new[view] = _grouped_view(here, view, new)
    anchors = anchors_of(first)
    for node in first.body:
        if node in anchors:
            new[node] = _grouped_anchor(here, node, first, new, offsets, ids)
        else:
            new[node] = here.copy(node, new)
        copy_place(node, new[node])

    # Step 3: every turn's result is its part of the whole.
    changed = {storage for _, storage in facts.changes}
    parts = here.call(torch.split, new[first.exit], sizes)
    for expert, turn in enumerate(loop.turns):
        part = here.call(operator.getitem, parts, expert)
        if first.depth > 1:
            sizes_of_rows = [here.method("size", turn.entries[0], dim) for dim in range(first.depth)]
            part = here.method("reshape", part, *sizes_of_rows, shape_of(turn.exit)[-1])
        if storage_of(turn.exit) in changed:
            # A part of a split is a view that autograd does not let anybody change in place.
            part = here.method("clone", part)
        take_place(turn.exit, part)

    # Step 4: users of early turns move behind the whole; the old turns go.
    old = {node for turn in loop.turns for node in turn.body}
    last = here.last
    for node in loop.delayed:
        if node not in old:
            last.append(node)
            last = node
    erase_unused(node for turn in loop.turns for node in (*turn.views, *turn.body))


def _in_front(here: Builder, entry: Node, depth: int) -> Node:
    """Write rows ``[.., n, d]`` as ``[R, 1, .., d]``: calls behind it mean the same dimensions."""
    return entry if depth == 1 else here.method("reshape", entry, -1, *[1] * (depth - 1), shape_of(entry)[-1])


def _grouped_anchor(
    here: Builder, node: Node, turn: Turn, new: dict[Node, Node], offsets: Node, ids: Callable[[], Node]
) -> Node:
    """Write a product or sum with one expert's parameter as one with those of all experts."""
    use, views, depth = matrix_operand(node, set(turn.views)), set(turn.views), turn.depth

    def of_rows(bias: Node) -> Node:
        return _in_front(here, here.call(operator.getitem, new[bias], ids()), depth)

    if use == "vector":
        return here.copy(node, new | {view: of_rows(view) for view in node.all_input_nodes if view in views})
    if use == "norm":
        vectors = [option(node, 2, "weight"), option(node, 3, "bias") if named(node, "layer_norm") else None]
        bare = {vector: None for vector in vectors if vector is not None}
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: bare.get(source, new.get(source, source)))
        out = here.call(node.target, *args, **kwargs)
        for vector, combine in zip(vectors, (operator.mul, operator.add), strict=True):
            if vector is not None:
                out = here.call(combine, out, of_rows(vector) if vector in views else new.get(vector, vector))
        return out
    x, w, *biases = operands(node)
    weight = here.method("transpose", new[w], 1, 2) if use == "linear" else new[w]
    rows = new.get(x, x) if depth == 1 else here.method("flatten", new[x], 0, depth - 1)
    out = _in_front(here, here.call(torch.ops.hecate.grouped_mm.default, rows, weight, offsets, True), depth)
    if biases and biases[0] is not None:
        bias = of_rows(biases[0]) if biases[0] in views else new.get(biases[0], biases[0])
        out = here.call(operator.add, out, bias)
    return out


def _grouped_view(here: Builder, view: Node, new: dict[Node, Node]) -> Node:
    """Write the view of one expert's matrix as a view of all: a leading dimension more."""
    if is_one_expert(view):
        return arg(view, 0)
    if is_transpose(view):
        return here.method("transpose", new[arg(view, 0)], 1, 2)
    return here.copy(view, new)
