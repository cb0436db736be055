"""Refuse graphs that would compute something else than the model does."""

from __future__ import annotations

from types import FrameType

import torch
from torch.fx import Graph, Node

from hecate.passes.analysis.expert_products import is_one_expert
from hecate.passes.analysis.torch_values import GraphFacts, gathers_by_layer, is_parameter, storage_of
from hecate.passes.fx import arg, calls, describe
from hecate.passes.match import named
from hecate.runtime.ops.gradients import replicate
from hecate.runtime.state.layer import get_layer
from hecate.wrap.shard import LOST_CHANGE
from hecate.wrap.untraced import WITHOUT_TRACING, UntracedReadError, untraced_read
from hecate.wrap.untraced_loops import chosen_by_data


def refuse_chosen_experts(graph: Graph, frame: FrameType) -> None:
    """Raise if a graph captured inside ``frame`` has some experts of a list, and data decide which."""
    for number, gathers in gathers_by_layer(graph).items():
        layer, users = get_layer(number), [user for gather in gathers for user in gather.users]
        experts = {arg(user, 1) for user in users if is_one_expert(user)}
        if not experts or len(experts) == layer.num_experts or not all(map(is_one_expert, users)):
            continue
        loop = chosen_by_data(frame, layer, [gather.stack_trace or "" for gather in gathers])
        if loop is not None:
            raise untraced_read(
                f"{layer.name} is called in a loop that torch.compile did not trace, expert by expert, and data "
                f"decide which.\n{loop}",
                "Ranks must call the same experts, because they exchange them, and other tokens choose others. A "
                "branch on how many rows an expert has (`if rows.numel() == 0: continue`) can be left out: zero "
                "rows cost nothing. Run with TORCH_LOGS=graph_breaks to see what else breaks the graph. "
                f"{WITHOUT_TRACING}",
                layer=layer.name,
            )


def refuse_lost_changes(graph: Graph, param_dtype: torch.dtype | None) -> None:
    """Raise if a graph changes a parameter in place of which it reads a copy, gathered or in ``param_dtype``."""
    copies: set[int | None] = set()
    for node in graph.nodes:
        if calls(node, torch.ops.hecate.gather_experts) or (param_dtype and _is_cast(node, param_dtype)):
            copies.add(storage_of(node))
        elif calls(node, torch.ops.hecate.gather_dense):
            copies |= {storage_of(user) for user in node.users}
    for node, storage in GraphFacts(graph).changes:
        if storage is not None and storage in copies:
            raise UntracedReadError(
                f"hecate: the forward changes a parameter in place: {describe(node)}. {LOST_CHANGE}"
            )


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    """Return whether a node is what mixed precision reads of a parameter of another dtype."""
    source = node.args[0] if named(node, "to") and node.args[1:] == (dtype,) else None
    read = isinstance(source, Node) and (calls(source, replicate) or is_parameter(source))
    return read and storage_of(source) != storage_of(node)
