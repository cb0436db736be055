"""skip_blocks: attention with the mask of S2-Attention computes only the blocks that are seen.

Needs    torch.nn.functional.scaled_dot_product_attention with a mask of hecate.s2_mask or hecate.s2_stored_mask,
         which shard_context put there; queries, keys and values of one type, or autocast, which is told by the
         result's type and makes them one: they are cast here. A single query without gradients.
Changes  scaled_dot_product_attention(q, repeat(k), repeat(v), s2_mask())         becomes  s2_attention(q, k, v)[0]
         with a single query                                                               s2_decode(q, s2_store(k))
         scaled_dot_product_attention(q, repeat(k), repeat(v), s2_stored_mask())  becomes  s2_decode(q, k, v)
         The mask is gone; how keys were repeated for query heads stays, unused, until autograd's graph is made.
Never    changes what is computed: without it the same model runs with the mask, at the cost of dense attention.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts, value_of
from hecate.passes.attention.attention_calls import (
    ATTENTION_OF,
    attends,
    name_of_layer,
    operands_of_attention,
    unrepeated,
)
from hecate.passes.attention.open_sizes import same_size
from hecate.passes.base import Outcome, PassContext, Refused, Skip
from hecate.passes.fx import Builder, arg, calls, copy_place, erase_unused
from hecate.runtime.attention.pattern import Pattern


def skip_blocks(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite all calls with such a mask."""
    facts = GraphFacts(gm.graph)
    rewritten, skipped = 0, []
    for node in list(gm.graph.nodes):
        if not attends(node):
            continue
        mask: Any = operands_of_attention(node).get("attn_mask")
        if not calls(mask, torch.ops.hecate.s2_mask, torch.ops.hecate.s2_stored_mask):
            continue
        try:
            _rewrite(node, mask, gm, facts)
            rewritten += 1
        except Refused as refused:
            reason = f"its mask is computed, which is right and slower than dense attention: {refused}"
            where = mask.meta.get(ATTENTION_OF) or name_of_layer(node)
            skipped.append(Skip(where=where, reason=reason, fallback=False, fix=refused.fix))
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _rewrite(node: Node, mask: Any, gm: GraphModule, facts: GraphFacts) -> None:
    given = operands_of_attention(node)
    query = given["query"]
    values = [value_of(given[name]) for name in ("query", "key", "value")]
    # Only autocast computes in another type than that of the operands.
    dtype = value_of(node).dtype
    single = same_size(values[0].shape[2], 1)
    if single and torch.is_grad_enabled():
        raise Refused("there is a single query, and gradients are recorded")
    scale = given.get("scale")
    scale = values[0].shape[3] ** -0.5 if scale is None else scale
    if not isinstance(scale, (int, float)):
        raise Refused("its scale is computed")
    key, value = (unrepeated(given[name], facts, until=node) for name in ("key", "value"))
    if value_of(value).shape[1] != value_of(key).shape[1]:
        key, value = given["key"], given["value"]
    *_, checked, numbers = mask.args
    heads, patterns = value_of(key).shape[1], Pattern(*numbers).patterns
    if single and heads % patterns:
        raise Refused(f"{heads} heads of keys have {patterns} patterns")
    # Nothing is written before this line: a call that is refused leaves the graph unchanged.
    builder = Builder(gm.graph, before=node)
    query, key, value = (
        x if value_of(x).dtype == dtype else builder.call(torch.ops.aten.to.dtype, x, dtype)
        for x in (query, key, value)
    )
    if not single:
        both = builder.call(torch.ops.hecate.s2_attention.default, query, key, value, checked, numbers, float(scale))
        copy_place(node, both)
        out = builder.call(operator.getitem, both, 0)
    else:
        if calls(mask, torch.ops.hecate.s2_mask):
            tokens = builder.call(torch.ops.aten.sym_size.int, key, 2)
            store = torch.ops.hecate.s2_store.default
            key, value = (builder.call(store, None, x, 0, numbers) for x in (key, value))
        else:
            tokens = arg(mask, 2)
        out = builder.call(
            torch.ops.hecate.s2_decode.default, query, key, value, tokens, checked, numbers, float(scale)
        )
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    erase_unused([node, mask])
