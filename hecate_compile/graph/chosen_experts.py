"""Refuse a graph of some experts of a list alone, if data have chosen them."""

from __future__ import annotations

from types import FrameType

from torch.fx import Graph

from hecate.passes.analysis.expert_uses import is_one_expert
from hecate.passes.analysis.torch_values import gathers_by_layer
from hecate.passes.fx import arg
from hecate.runtime.comm.world import World
from hecate.runtime.state.layer import get_layer
from hecate.wrap.parameter_reads import WITHOUT_TRACING, UntracedReadError
from hecate.wrap.untraced_loops import chosen_by_data


def refuse_chosen_experts(graph: Graph, world: World, frame: FrameType) -> None:
    """Raise if a graph captured inside ``frame`` has some experts of a list, and data decide which."""
    if world.size == 1:
        return
    for number, gathers in gathers_by_layer(graph).items():
        layer, users = get_layer(number), [user for gather in gathers for user in gather.users]
        experts = {arg(user, 1) for user in users if is_one_expert(user)}
        if not experts or len(experts) == layer.num_experts or not all(map(is_one_expert, users)):
            continue
        loop = chosen_by_data(frame, layer, [gather.stack_trace or "" for gather in gathers])
        if loop is not None:
            raise UntracedReadError(
                f"hecate: {layer.name} is called in a loop that torch.compile did not trace, expert by "
                f"expert, and data decide which.\n{loop}\n"
                "Ranks must call the same experts, because they exchange them, and other tokens choose others. A "
                "branch on how many rows an expert has (`if rows.numel() == 0: continue`) can be left out: zero "
                "rows cost nothing. Run with TORCH_LOGS=graph_breaks to see what else breaks the graph. "
                f"{WITHOUT_TRACING}"
            )
