"""Rows of one token, and proof that a token's row may cross to another node once.

Rows may be exchanged by nodes (``hecate.runtime.ops.exchange``) if

1. every entry of the region is a gather by token: rows of one token are equal, and of their gradients only the sum is
   used;
2. of every exit only the sum over a token's rows is used, by the same token index.

The factor by which models multiply a result before they sum, the routing weight of its row, moves into the region; it
travels as another entry, a single value for each row. These forms are recognized:

    hidden[index]; out.index_add(0, index, y)                                 any index of tokens, also a mask
    hidden[order // k]; y[inverse of order].view(T, k, H).sum(1)              as transformers' grouped_mm has it
    cat([hidden[i0], ...]); a, ... = split(y); out.index_add_(0, i0, a) ...   from group_expert_loops

and casts in between. Everything else is refused, with the operator's name; then each row travels by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from hecate.passes.analysis.find_region import Region
from hecate.passes.analysis.row_sums import (
    Exit,
    casts_behind,
    drop_parts,
    is_cat,
    joined_split,
    quotient_of,
    same_index,
)
from hecate.passes.analysis.torch_values import GraphFacts, value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, closure_forward, describe, is_getitem
from hecate.passes.match import named


@dataclass(frozen=True, kw_only=True)
class NodeRows:
    """A region whose rows may cross to each node once.

    Attributes:
        region: with the multiplications by routing weights in it, and the weights among its entries.
        weights: those entries ``[R, 1]``; the others are gathered by token.
        tokens: the token of each row, int, or a mask of tokens; the concatenation of several where the rows are one.
        choices: rows of each token; 0 where the graph does not tell.
    """

    region: Region
    weights: tuple[Node, ...]
    tokens: tuple[Node, ...]
    choices: int


def prove_node_rows(facts: GraphFacts, region: Region) -> NodeRows:
    """Prove both facts, and use exits that were cut and put together again whole. Raises Refused."""
    gathered = [_gathered_by(facts, entry) for entry in region.entries]
    tokens = gathered[0]
    if not all(same_index(tokens, other) for other in gathered[1:]):
        raise Refused("its rows are gathered by different tokens")
    body = set(region.body)
    for exit in region.exits:
        if any(user in body for user in exit.users):
            raise Refused(f"{describe(exit)} is used inside the experts and behind them", exit)
    exits = [Exit(exit, region.entries[0]) for exit in region.exits]
    last = max(exit.follow(facts, tokens) for exit in exits)
    # An index may be a quotient of a permutation.
    quotients = [divided for index in tokens if (divided := quotient_of(index)) is not None]
    facts.refuse_changes_of([*tokens, *(order for order, _ in quotients)], until=last)
    weighted = _with_weights(facts, region, exits)
    choices = {count for _, count in quotients}
    return NodeRows(
        region=weighted,
        weights=tuple(entry for entry in weighted.entries if entry not in region.entries),
        tokens=tokens,
        choices=choices.pop() if len(tokens) == len(choices) == 1 else 0,
    )


# --- the entries ---


def _gathered_by(facts: GraphFacts, entry: Node) -> tuple[Node, ...]:
    """Return the index by which rows were gathered from one tensor of tokens, in pieces."""
    pieces = [_gather(piece) for piece in _pieces(entry)]
    if len({source for source, _ in pieces}) != 1:
        raise Refused("its rows are gathered from different tensors")
    # A tensor that changes between two gathers would give a token two rows.
    facts.refuse_changes_of([entry, *_pieces(entry), *casts_behind(entry), pieces[0][0]], until=entry)
    return tuple(index for _, index in pieces)


def _pieces(rows: Node) -> list[Node]:
    """Return the pieces of which rows are the concatenation."""
    rows = casts_behind(rows)[-1]
    whole = joined_split(rows)
    if whole is not None:
        return _pieces(whole)
    if is_cat(rows):
        return [casts_behind(piece)[-1] for piece in arg(rows, 0)]
    return [rows]


def _gather(rows: Node) -> tuple[Node, Node]:
    """Return the tensor of tokens and the index of ``tokens[index]``."""
    source: Any = None
    index: Any = None
    if named(rows, "reshape", "view") and is_getitem(arg(rows, 0)) and _adds_a_line(arg(rows, 0), rows):
        source, (_, index) = arg(arg(rows, 0), 0), arg(arg(rows, 0), 1)
    elif is_getitem(rows):
        source, index = arg(rows, 0), arg(rows, 1)
    elif named(rows, "index_select") and len(rows.args) == 3 and arg(rows, 1) == 0:
        source, index = arg(rows, 0), arg(rows, 2)
    numbers = value_of(index)
    # A line of the numbers of tokens, or a mask of them.
    kinds = (torch.int64, torch.int32, torch.bool)
    is_line = isinstance(numbers, torch.Tensor) and numbers.ndim == 1 and numbers.dtype in kinds
    if not isinstance(source, Node) or not is_line:
        raise Refused(f"its rows come from {describe(rows)}, which is no gather by token", rows)
    return source, index


def _adds_a_line(gathered: Node, rows: Node) -> bool:
    """Tell whether ``rows`` is ``x[None, index].reshape(-1, H)``, which is ``x[index]``."""
    index, source, flat = arg(gathered, 1), value_of(arg(gathered, 0)), value_of(rows)
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not None:
        return False
    shapes = isinstance(source, torch.Tensor) and isinstance(flat, torch.Tensor) and source.ndim == flat.ndim == 2
    return shapes and str(source.shape[1]) == str(flat.shape[1])


# --- the region with its weights ---


def _with_weights(facts: GraphFacts, region: Region, exits: Sequence[Exit]) -> Region:
    """Return the region with multiplications by routing weights in it, checked."""
    inside = [node for exit in exits for node in exit.inside]
    factors = [factor for exit in exits for factor in exit.factors]
    late = closure_forward(region.body, until=max(factors)) if factors else set()
    for factor in factors:
        if factor in late:
            raise Refused(f"{describe(factor)} is computed from the experts' own result", factor)
    facts.refuse_mixed_modes((*inside, *region.exits), "behind the experts")
    for exit in exits:
        for whole, rows in exit.joined:
            drop_parts(whole, rows)
    weighted = replace(
        region,
        entries=tuple(dict.fromkeys((*region.entries, *factors))),
        body=tuple(sorted({*region.body, *inside})),
        exits=tuple(exit.inside[-1] if exit.inside else exit.exit for exit in exits),
    )
    if inside:
        weighted.check_rows_apart()
    return weighted
