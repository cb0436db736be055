"""drop_sentinels: masks of expert numbers that no token can have are dropped.

transformers up to 5.17 guards its experts against numbers beyond the last one, with which a router stands for experts
of other processes, also where there are none. Who computes with the mask computes from this rank's own tokens.

Needs    expert numbers that come from a topk or argmax over E scores, or a remainder of E, sorted and reshaped in any
         way.
Changes  mask = (ids >= E).unsqueeze(-1); x.masked_fill_(mask, 0); y = y.masked_fill(mask, 0)   become   x and y
         ids.clamp_(max=E - 1)                                                                   becomes  ids
Never    touches a comparison with a smaller number, or numbers of which it cannot be told where they come from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.expert_numbers import CLAMPS, SAME_NUMBERS, bound_of, changes_of, clamp_keeps, may_grow
from hecate.passes.analysis.torch_values import value_of
from hecate.passes.base import Outcome, PassContext
from hecate.passes.match import name_of, named


def drop_sentinels(gm: GraphModule, context: PassContext) -> Outcome:
    """Drop masks one after the other, since the last one dropped may have changed the numbers before."""
    rewritten = 0
    for node in list(gm.graph.nodes):
        name, source = name_of(node), node.args[0] if node.args else None
        if not isinstance(source, Node) or not (_fills_nothing(node, name) or _clamps_nothing(node, name)):
            continue
        # A copy and its source may share memory if nothing is written to either afterwards.
        if name.endswith("_") or (not changes_of(node) and all(change < node for change in changes_of(source))):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            rewritten += 1
    for node in reversed(list(gm.graph.nodes) if rewritten else ()):
        is_mask = named(node, "ge", *SAME_NUMBERS) and getattr(value_of(node), "dtype", None) == torch.bool
        if is_mask and not node.users:
            gm.graph.erase_node(node)
    return Outcome(rewritten=rewritten)


def _fills_nothing(node: Node, name: str) -> bool:
    if name not in ("masked_fill", "masked_fill_") or len(node.args) < 2 or not _is_never(node.args[1]):
        return False
    # A mask may be larger than the value that it masks.
    before, after = value_of(node.args[0]), value_of(node)
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.shape == after.shape


def _clamps_nothing(node: Node, name: str) -> bool:
    if name not in CLAMPS:
        return False
    bound = bound_of(node.args[0])
    return bound is not None and clamp_keeps(node, bound - 1)


def _is_never(mask: Any) -> bool:
    """Tell whether a mask is false everywhere: it looks for numbers that are at least as large as their bound."""
    # Each step is checked, for a copy has memory of its own.
    while isinstance(mask, Node) and name_of(mask) in SAME_NUMBERS and mask.args and not may_grow(mask):
        mask = mask.args[0]
    if not isinstance(mask, Node) or name_of(mask) != "ge" or len(mask.args) != 2 or mask.kwargs:
        return False
    bound, least = bound_of(mask.args[0]), mask.args[1]
    return bound is not None and type(least) is int and least >= bound and not may_grow(mask)
