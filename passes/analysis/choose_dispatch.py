"""Choice of how the rows of a layer travel: each by itself or to each node once, and in how many parts.

Crossing once saves bytes between nodes, and costs a second hop after the first and more starts. Rows are cut into
parts so that one travels while another is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from hecate.passes.analysis.find_region import Region
from hecate.passes.analysis.node_rows import NodeRows, prove_node_rows
from hecate.passes.analysis.torch_values import GraphFacts, value_of
from hecate.passes.base import PassContext, Refused, Skip
from hecate.passes.fx import skip_of

# Exchanges of a layer in forward and backward, and how many more collectives start when rows cross once: a second hop
# of each, the weights there and their gradients back, and the messages to relays.
_EXCHANGES, _MORE_STARTS = 4, 7
# Predictions that differ by less leave everything unchanged.
_LEAST_GAIN = 0.1
# Seconds of one more exchange, with the operators around it. On the emulated cluster, whose ranks have a seventh of a
# core, two chunks broke even at this. That of GPUs is an estimate.
_START_SECONDS = {"cpu": 1e-2, "cuda": 5e-5}
# Further exchanges with two chunks: two in the forward and two in the backward.
_MORE_EXCHANGES = 4


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way in which rows of a region travel: crossing to ``nodes`` once, in ``chunks`` parts; why not more."""

    region: Region
    nodes: NodeRows | None
    chunks: int
    skipped: tuple[Skip, ...]


def how_rows_travel(facts: GraphFacts, region: Region, context: PassContext) -> Way:
    """Return the way of a region's rows, as the user says or as is predicted to pay; equal on all ranks."""
    nodes, skipped, where = None, [], context.name(region.layer)
    try:
        nodes = _choose_node_rows(facts, region, context)
    except Refused as reason:
        why = f"its rows travel each by itself: {reason}"
        fix = 'Config(dispatch="rows") says the same, without this line'
        skipped.append(skip_of(where, reason, reason=why, fallback=False, fix=fix))
    chunks = 1 if nodes is not None else _chunks_of(region, context)
    if context.world_size > 1 and context.chunks not in ("auto", chunks):
        used_early = "its results are used before all of it is computed"
        why = "its rows cross to each node once" if nodes is not None else used_early
        fix = "Config(chunks=1) says the same, without this line"
        skipped.append(Skip(where=where, reason=f"{why}, so its rows travel in one part", fallback=False, fix=fix))
    region = nodes.region if nodes is not None else region
    return Way(region=region, nodes=nodes, chunks=chunks, skipped=tuple(skipped))


def _choose_node_rows(facts: GraphFacts, region: Region, context: PassContext) -> NodeRows | None:
    """Return the region as exchanged by nodes, None where rows travel each by themselves.

    Raises Refused where the user asked for nodes and they cannot be had.
    """
    if context.dispatch == "rows" or context.world_size == 1:
        return None
    if context.dispatch == "nodes":
        if context.nodes == 1:
            raise Refused("all ranks are on one node")
        return prove_node_rows(facts, region)
    # Replicas keep most rows in their node, and the planner counts on single rows between nodes.
    predicted = context.tokens and context.overlaps and context.chunks in ("auto", 1)
    if context.replicates or context.nodes == 1 or not predicted:
        return None
    try:
        found = prove_node_rows(facts, region)
    except Refused:
        return None
    size = _row_size(region)
    return found if size is not None and found.choices and _nodes_pay(found.choices, size, context) else None


@dataclass(frozen=True, kw_only=True)
class _RowSize:
    """Bytes and forward operations of one row of a region, and seconds that one more exchange takes to start."""

    bytes: int
    flops: int
    start: float


def _row_size(region: Region) -> _RowSize | None:
    """Return the size of a region's rows; None where the graph does not tell."""
    weights = [value for gather in region.gathers if (value := value_of(gather)) is not None and value.ndim == 3]
    if not weights:
        return None
    return _RowSize(
        bytes=sum(_row_bytes(entry, weights) for entry in region.entries),
        flops=sum(2 * int(weight.shape[1]) * int(weight.shape[2]) for weight in weights),
        start=_START_SECONDS["cuda" if weights[0].is_cuda else "cpu"],
    )


def _row_bytes(entry: Node, weights: list[torch.Tensor]) -> int:
    """Return the bytes of a row; for rows that a pass has put together, the least that a matmul may take."""
    value = value_of(entry)
    if value is None:
        return min(min(weight.shape[1:]) * weight.element_size() for weight in weights)
    return prod(map(int, value.shape[1:])) * value.element_size()


def _nodes_pay(choices: int, size: _RowSize, context: PassContext) -> bool:
    """Tell whether a step's exchanges are predicted to take clearly less time by node."""
    tokens, rows = context.tokens, context.tokens * choices
    node = context.ranks_per_node / context.world_size
    inside = size.bytes / context.rates.rank_bytes
    crossing = size.bytes / context.link_bytes
    by_rows = max(rows * (1 - node) * crossing, rows * (node - 1 / context.world_size) * inside)
    nodes_per_token = (context.nodes - 1) * (1 - (1 - node) ** choices)
    by_nodes = tokens * nodes_per_token * crossing + rows * (1 - 1 / context.ranks_per_node) * inside
    hidden = _hidden_seconds(size, rows, by_rows, context) if context.chunks == "auto" else 0.0
    before = _EXCHANGES * by_rows - max(0.0, hidden)
    return _EXCHANGES * by_nodes + _MORE_STARTS * size.start < (1 - _LEAST_GAIN) * before


def _chunks_of(region: Region, context: PassContext) -> int:
    """Return the number of parts of a region's rows; one where the results are used before the body's end."""
    body = set(region.body)
    if any(user < region.body[-1] for exit in region.exits for user in exit.users if user not in body):
        return 1
    if context.chunks != "auto":
        return context.chunks
    size = _row_size(region)
    if not context.tokens or not context.overlaps or size is None:
        return 1
    # This counts one row for each token.
    exchange = context.tokens * size.bytes * (context.world_size - 1) / context.world_size / context.link_bytes
    return 2 if _hidden_seconds(size, context.tokens, exchange, context) > 0 else 1


def _hidden_seconds(size: _RowSize, rows: float, exchange: float, context: PassContext) -> float:
    """Return the seconds that two chunks save in a step, less their cost; below zero where they do not pay."""
    compute = rows * size.flops / context.rates.flops
    return 2 * min(exchange, compute) - _MORE_EXCHANGES * size.start
