"""split_collectives: start a collective in one place, wait for it in another.

Needs    operators of ``hecate.runtime.define.COLLECTIVES`` in a forward or backward graph.
Changes  y = f(x)   becomes   token = f_start(x, [], note); y = f_wait(token, x)
Never    moves anything: both halves stand where the collective stood.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.contract import Outcome, PassContext
from hecate.passes.nodes import fake_mode_of
from hecate.runtime.define import COLLECTIVES


def split_collectives(gm: GraphModule, context: PassContext) -> Outcome:
    """Replace every collective by its two halves."""
    graph, count = gm.graph, 0
    for node in list(graph.nodes):
        split = COLLECTIVES.get(node.target)
        if node.op != "call_function" or split is None:
            continue
        args = _all_arguments(node)
        with graph.inserting_before(node):
            start = graph.call_function(split.start, (*args, [], note_of(node, context)))
            wait = graph.call_function(split.wait, (start, *args))
        wait.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
        mode = fake_mode_of(gm)
        if mode is not None:
            with mode:
                start.meta["val"] = torch.empty(1, dtype=torch.int64)
        node.replace_all_uses_with(wait)
        graph.erase_node(node)
        count += 1
    return Outcome(rewritten=count)


def _all_arguments(node: Node) -> list[Any]:
    """Positional arguments, with those that were given by name or left at their default."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = list(node.args)
    return given + [node.kwargs[argument.name] for argument in schema.arguments[len(given) :]]


def note_of(node: Node, context: PassContext) -> str:
    """What a collective is called in explanations and timelines: the operator, and the layer or what it carries."""
    name = node.target.name().split("::")[1].partition("_start")[0]  # type: ignore[union-attr]
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "layer" in arguments:
        return f"{name} {context.name(node.args[arguments.index('layer')])}"  # type: ignore[arg-type]
    return f"{name} of {len(node.args[1])} parameters"  # type: ignore[arg-type]
