"""drop_causal_masks: attention gets is_causal=True instead of a mask that says the same.

Needs    torch.nn.functional.scaled_dot_product_attention with a boolean mask that is computed from sizes and
         constants alone, and causal at every size that the graph allows (mask_cone); as many queries as keys.
Changes  scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False, ...)       becomes
         scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True, ...)
         What computed the mask stays, and goes with the other unused nodes when autograd's graph is made.
Never    touches a mask that depends on data, such as padding or given positions, one with numbers in it, one with a
         window, or one that some size might change; changes dropout, scale or the grouping of heads.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from hecate.passes.attention.attention_calls import (
    Scope,
    attends,
    change_operands,
    name_of_layer,
    operands_of_attention,
)
from hecate.passes.attention.causal_masks import CausalMasks
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import skip_of

# Key on a call that was looked at with the graph around it, which knows more than the body of a checkpointed layer
# alone.
_LOOKED_AT = "hecate_mask_looked_at"


def drop_causal_masks(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the calls of ``gm`` and of the checkpointed layers in it."""
    root = Scope(gm)
    rewritten = 0
    masks = CausalMasks()
    left: dict[str, list[Node]] = {}
    for scope in (root, *root.bodies()):
        for node in scope.gm.graph.nodes:
            given = operands_of_attention(node) if attends(node) else {}
            if _LOOKED_AT in node.meta or not isinstance(given.get("attn_mask"), Node):
                continue
            node.meta[_LOOKED_AT] = True
            try:
                masks.refuse_others(node, scope)
            except Refused as refused:
                left.setdefault(str(refused), []).append(node)
                continue
            # Two arguments change and no node: a rank with longer sequences may have to keep a mask that another one
            # drops, and the operators of their graphs are compared.
            change_operands(node, {"attn_mask": None, "is_causal": True})
            rewritten += 1
    skipped = []
    for reason, (first, *others) in left.items():
        more = f" and {len(others)} more" if others else ""
        skipped.append(skip_of(name_of_layer(first) + more, Refused(reason, first), fallback=False))
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))
