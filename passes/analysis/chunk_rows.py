"""Number of parts into which the rows of a layer are cut, so that one travels while another is computed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from hecate.passes.analysis.find_region import Region
from hecate.passes.analysis.torch_values import value_of
from hecate.passes.base import PassContext

# Seconds of one more exchange, with the operators around it. On the emulated cluster, whose ranks have a seventh of a
# core, two chunks broke even at this. That of GPUs is an estimate.
_START_SECONDS = {"cpu": 1e-2, "cuda": 5e-5}
# Further exchanges with two chunks: two in the forward and two in the backward.
_MORE_EXCHANGES = 4


def chunks_of(region: Region, context: PassContext) -> int:
    """Return the number of chunks of a region's rows, as the user says or as many as pay; equal on all ranks."""
    if not _may_be_cut(region):
        return 1
    if context.chunks != "auto":
        return context.chunks
    return 2 if _two_pay(region, context) else 1


def _may_be_cut(region: Region) -> bool:
    """Tell whether all users of the results come behind the whole body, so that the body may be computed in turns."""
    body = set(region.body)
    return all(user > region.body[-1] for exit in region.exits for user in exit.users if user not in body)


def _two_pay(region: Region, context: PassContext) -> bool:
    """Tell whether two chunks save more time than further starts take, at one row for each token."""
    size = row_size(region)
    if not context.tokens or size is None:
        return False
    exchange = context.tokens * size.bytes * (context.world_size - 1) / context.world_size / context.link_bytes
    return hidden_seconds(size, context.tokens, exchange, context) > 0


@dataclass(frozen=True, kw_only=True)
class RowSize:
    """Bytes and forward operations of one row of a region, and seconds that one more exchange takes to start."""

    bytes: int
    flops: int
    start: float


def row_size(region: Region) -> RowSize | None:
    """Return the size of a region's rows; None where the graph does not tell."""
    weights = [value for gather in region.gathers if (value := value_of(gather)) is not None and value.ndim == 3]
    if not weights:
        return None
    return RowSize(
        bytes=sum(_row_bytes(entry, weights) for entry in region.entries),
        flops=sum(2 * int(weight.shape[1]) * int(weight.shape[2]) for weight in weights),
        start=_START_SECONDS["cuda" if weights[0].is_cuda else "cpu"],
    )


def hidden_seconds(size: RowSize, rows: float, exchange: float, context: PassContext) -> float:
    """Return the seconds that two chunks save in a step, less their cost; below zero where they do not pay."""
    compute = rows * size.flops / context.rates.flops
    return 2 * min(exchange, compute) - _MORE_EXCHANGES * size.start


def _row_bytes(entry: Node, weights: list[torch.Tensor]) -> int:
    """Return the bytes of a row; for rows that a pass has put together, the least that a matmul may take."""
    value = value_of(entry)
    if value is None:
        return min(min(weight.shape[1:]) * weight.element_size() for weight in weights)
    return prod(map(int, value.shape[1:])) * value.element_size()
