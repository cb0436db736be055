"""Choice of how the rows of a layer travel: each by itself, or to each node once.

Crossing once saves bytes between nodes, and costs a second hop after the first and more starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hecate.passes.analysis.chunk_rows import RowSize, chunks_of, hidden_seconds, row_size
from hecate.passes.analysis.find_region import Region
from hecate.passes.analysis.node_rows import NodeRows, prove_node_rows
from hecate.passes.analysis.torch_values import GraphFacts
from hecate.passes.base import PassContext, Refused, Skip
from hecate.passes.fx import skip_of

# Exchanges of a layer in forward and backward, and how many more collectives start when rows cross once: a second hop
# of each, the weights there and their gradients back, and the messages to relays.
_EXCHANGES, _MORE_STARTS = 4, 7
# Predictions that differ by less leave everything unchanged.
_LEAST_GAIN = 0.1


def choose_node_rows(facts: GraphFacts, region: Region, context: PassContext) -> NodeRows | None:
    """Return the region as exchanged by nodes, None where rows travel each by themselves; equal on all ranks.

    Raises Refused where the user asked for nodes and they cannot be had.
    """
    if context.dispatch == "rows" or context.world_size == 1:
        return None
    if context.dispatch == "nodes":
        if context.nodes == 1:
            raise Refused("all ranks are on one node")
        return prove_node_rows(facts, region)
    # Replicas keep most rows in their node, and the planner counts on single rows between nodes.
    if context.replicates or context.nodes == 1 or not context.tokens or context.chunks not in ("auto", 1):
        return None
    try:
        found = prove_node_rows(facts, region)
    except Refused:
        return None
    size = row_size(region)
    return found if size is not None and found.choices and _nodes_pay(found.choices, size, context) else None


def _nodes_pay(choices: int, size: RowSize, context: PassContext) -> bool:
    """Tell whether a step's exchanges are predicted to take clearly less time by node."""
    tokens, rows = context.tokens, context.tokens * choices
    node = context.ranks_per_node / context.world_size
    inside = size.bytes / context.rates.rank_bytes
    crossing = size.bytes / context.link_bytes
    by_rows = max(rows * (1 - node) * crossing, rows * (node - 1 / context.world_size) * inside)
    nodes_per_token = (context.nodes - 1) * (1 - (1 - node) ** choices)
    by_nodes = tokens * nodes_per_token * crossing + rows * (1 - 1 / context.ranks_per_node) * inside
    hidden = hidden_seconds(size, rows, by_rows, context) if context.chunks == "auto" else 0.0
    before = _EXCHANGES * by_rows - max(0.0, hidden)
    return _EXCHANGES * by_nodes + _MORE_STARTS * size.start < (1 - _LEAST_GAIN) * before


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way in which rows of a region travel: crossing to ``nodes`` once, in ``chunks`` parts; why not more."""

    region: Region
    nodes: NodeRows | None
    chunks: int
    skipped: tuple[Skip, ...]


def how_rows_travel(facts: GraphFacts, region: Region, context: PassContext) -> Way:
    nodes, skipped, where = None, [], context.name(region.layer)
    try:
        nodes = choose_node_rows(facts, region, context)
    except Refused as reason:
        why = f"its rows travel each by itself: {reason}"
        fix = 'Config(dispatch="rows") says the same, without this line'
        skipped.append(skip_of(where, reason, reason=why, fallback=False, fix=fix))
    chunks = 1 if nodes is not None else chunks_of(region, context)
    if context.world_size > 1 and context.chunks not in ("auto", chunks):
        used_early = "its results are used before all of it is computed"
        why = "its rows cross to each node once" if nodes is not None else used_early
        fix = "Config(chunks=1) says the same, without this line"
        skipped.append(Skip(where=where, reason=f"{why}, so its rows travel in one part", fallback=False, fix=fix))
    region = nodes.region if nodes is not None else region
    return Way(region=region, nodes=nodes, chunks=chunks, skipped=tuple(skipped))
