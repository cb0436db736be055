"""shard_context: causal attention gets the mask that Config(attention=...) asks for.

Needs    torch.nn.functional.scaled_dot_product_attention that is causal: is_causal=True, or a boolean mask that says
         so at every size that the graph allows, or one query for all keys, as in generation. Without gradients also a
         mask that depends on data: it is checked when it runs. No dropout. Heads of keys as the model's config says.
Changes  scaled_dot_product_attention(q, k, v, is_causal=True, ...)                                      becomes
         scaled_dot_product_attention(q, k, v, attn_mask=hecate.s2_mask(q, k, None, pattern), ...)
         and over a hecate.S2Cache
         scaled_dot_product_attention(q, k, v, ...)                                                      becomes
         scaled_dot_product_attention(q, k, v, attn_mask=hecate.s2_stored_mask(q, k, tokens, checked, pattern), ...)
         in all layers but the dense ones.
Never    leaves a layer as it is that should be sparse: it would be another model, so it raises, with the layer and
         the reason. That is also why it cannot be switched off. Nothing gets faster by it; skip_blocks comes behind.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import size_hint, value_of
from hecate.passes.attention.attention_calls import (
    ATTENTION_OF,
    Scope,
    attends,
    change_operands,
    name_of_layer,
    number_of_layer,
    operands_of_attention,
    unrepeated,
)
from hecate.passes.attention.causal_masks import CausalMasks, UnknownMask
from hecate.passes.attention.open_sizes import same_size
from hecate.passes.base import Outcome, PassContext, Refused, Remark
from hecate.passes.fx import Builder, arg, calls, copy_place, reached
from hecate.passes.match import name_of
from hecate.runtime.attention.options import S2Attention, UnsupportedAttentionError
from hecate.runtime.attention.pattern import Pattern

_LOOKED_AT = "hecate_context_looked_at"
# The most nodes among which a softmax's scores are looked for.
_NEAR = 64


def shard_context(gm: GraphModule, context: PassContext) -> Outcome:
    """Give every sparse layer of ``gm``, and of the checkpointed layers in it, its mask.

    Raises UnsupportedAttentionError, which names the layer and what S2-Attention cannot do.
    """
    if context.attention is None:
        return Outcome()
    work = _Work(context.attention, context.key_heads)
    root = Scope(gm)
    for scope in (root, *root.bodies()):
        for node in list(scope.gm.graph.nodes):
            # The runner gives bodies to a pass by themselves, too.
            if _LOOKED_AT not in node.meta and (attends(node) or _attends_by_hand(node)):
                node.meta[_LOOKED_AT] = True
                work.rewrite(node, scope)
    return Outcome(rewritten=work.rewritten, remarks=tuple(work.remarks))


class _Work:
    """A run of the pass, with what is known about masks and layers so far."""

    def __init__(self, options: S2Attention, key_heads: int | None) -> None:
        self.options, self.key_heads = options, key_heads
        self.rewritten = 0
        self.remarks: list[Remark] = []
        self._masks = CausalMasks()
        self._names: dict[int, str] = {}
        self._checks: dict[tuple[Scope, Node], Node] = {}

    def rewrite(self, node: Node, scope: Scope) -> None:
        """Give one call its mask, if its layer is sparse."""
        name = name_of_layer(node, scope)
        try:
            if self._is_dense(name, number_of_layer(node, scope)):
                self.remarks.append(Remark(where=name, text="dense, as dense_layers says"))
                return
            if not attends(node):
                raise Refused(
                    "it computes its weights by hand or by another function than scaled_dot_product_attention, as "
                    "eager attention, nn.MultiheadAttention and attention with sinks do. "
                    'attn_implementation="sdpa" has what is rewritten; GPT-OSS has sinks and cannot have it'
                )
            pattern, length = self._shard(node, scope, name)
        except (Refused, ValueError) as refused:
            reason = str(refused).removeprefix("hecate.S2Attention: ")
            advice = "" if "dense_layers" in reason else ". S2Attention(dense_layers=...) leaves layers as they are"
            raise UnsupportedAttentionError(f"hecate: {name} cannot have S2-Attention: {reason}{advice}") from None
        self.rewritten += 1
        self.remarks.append(Remark(where=name, text=_costs(pattern, length)))

    def _is_dense(self, name: str, number: int | None) -> bool:
        if not self.options.numbers_layers:
            return False
        if number is None:
            raise Refused("its number is not known, so not whether it is one of dense_layers. Give dense_layers=()")
        if self._names.setdefault(number, name) != name:
            raise Refused(f"{self._names[number]} has the number {number}, too. Give dense_layers=()")
        return self.options.is_dense(number)

    def _shard(self, node: Node, scope: Scope, name: str) -> tuple[Pattern, int]:
        given = operands_of_attention(node)
        query, key = value_of(given["query"]), value_of(given["key"])
        if not all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in (query, key)):
            raise Refused("queries and keys are not [batch, heads, length, size]")
        if given.get("dropout_p") not in (None, 0, 0.0):
            raise Refused("it has dropout on its weights. Set attention_dropout=0")
        source = unrepeated(given["key"], scope.facts, until=node)
        pattern = self._pattern(query.shape[1], value_of(source).shape[1])
        single = same_size(query.shape[2], 1)
        checked = self._check(node, scope, given, name, single)
        builder = Builder(scope.gm.graph, before=node)
        if calls(source, torch.ops.hecate.s2_store):
            mask = _mask_of_stored(builder, given, source, pattern, checked, single)
        else:
            if single and _from_store(given["key"]):
                raise Refused("its keys are computed from what the cache kept. hecate.S2Cache keeps whole keys only")
            mask = builder.call(
                torch.ops.hecate.s2_mask.default, given["query"], given["key"], checked, pattern.numbers
            )
        copy_place(node, mask)
        mask.meta[ATTENTION_OF] = name
        change_operands(node, {"attn_mask": mask, "is_causal": False})
        return pattern, size_hint(key.shape[2])

    def _pattern(self, query_heads: Any, key_heads: Any) -> Pattern:
        if not isinstance(query_heads, int) or not isinstance(key_heads, int) or query_heads % key_heads:
            raise Refused(f"it has {query_heads} heads of queries and {key_heads} of keys")
        if self.options.per == "kv" and self.key_heads not in (None, key_heads):
            raise Refused(
                f"it has keys of {key_heads} heads where the model's config says {self.key_heads}: how they are "
                'repeated is not understood. per="q" does not need to know'
            )
        return self.options.pattern(query_heads, key_heads)

    def _check(self, node: Node, scope: Scope, given: dict[str, Any], name: str, single: bool) -> Node | None:
        """Raise unless a call is causal; return the check of a mask that is known only when it runs."""
        mask, is_causal = given.get("attn_mask"), given.get("is_causal", False)
        if not isinstance(is_causal, bool):
            raise Refused("whether it is causal is computed")
        if mask is None:
            alone = single and not is_causal
            square = same_size(value_of(given["query"]).shape[2], value_of(given["key"]).shape[2])
            if not alone and not (is_causal and square):
                raise Refused("it is not causal, or has other queries than keys")
            return None
        if not isinstance(mask, Node) or not isinstance(value_of(mask), torch.Tensor):
            raise Refused("its mask is no tensor of the graph")
        if value_of(mask).dtype is not torch.bool:
            raise Refused("its mask is numbers that are added, not true and false")
        if is_causal:
            raise Refused("it has a mask and is_causal")
        if not single:
            try:
                self._masks.refuse_others(node, scope)
                return None
            except UnknownMask:
                # In training, a check in each step would cost as much as the mask; there a user can leave the mask
                # out.
                if torch.is_grad_enabled():
                    raise
                if not same_size(value_of(given["query"]).shape[2], value_of(given["key"]).shape[2]):
                    raise Refused("it has other queries than keys, and more than one") from None
        found = self._checks.get((scope, mask))
        if found is None:
            found = Builder(scope.gm.graph, before=node).call(torch.ops.hecate.s2_check.default, name, mask)
            copy_place(node, found)
            self._checks[scope, mask] = found
        return found


def _mask_of_stored(
    builder: Builder, given: dict[str, Any], source: Node, pattern: Pattern, checked: Node | None, single: bool
) -> Node:
    """Return the mask of keys that come from a cache that keeps some."""
    seen = arg(source, 2)
    if not single or list(arg(source, 3)) != pattern.numbers:
        raise Refused("its cache was made for other options. Make a new hecate.S2Cache of the compiled model")
    tokens = builder.call(operator.add, seen, 1) if isinstance(seen, Node) else seen + 1
    return builder.call(
        torch.ops.hecate.s2_stored_mask.default, given["query"], given["key"], tokens, checked, pattern.numbers
    )


def _from_store(key: Node) -> bool:
    """Tell whether keys are made of a sparse cache's without being just these: some of them are missing."""
    made_of = reached([key], lambda node: [] if attends(node) else node.all_input_nodes)
    return any(calls(node, torch.ops.hecate.s2_store) for node in {key, *made_of})


def _attends_by_hand(node: Node) -> bool:
    """Tell whether a node is the softmax of an attention that is written out, or an attention of another kind."""
    if node.op == "call_function" and any(part in name_of(node) for part in _OTHER_KINDS):
        return not attends(node)
    value = value_of(node)
    if _operation(node) not in ("softmax", "_softmax") or not isinstance(value, torch.Tensor):
        return False
    return value.ndim >= 3 and _of_scores(node)


# Parts of the names of functions that attend, other than scaled_dot_product_attention.
_OTHER_KINDS = (
    "scaled_dot_product",
    "multi_head_attention",
    "native_multi_head",
    "flex_attention",
    "flash_attn",
    "varlen_attn",
)
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


def _operation(node: Node) -> str:
    """Return the name of a function, method or operator, without that of an operator's overload."""
    return name_of(node).partition(".")[0]


def _of_scores(node: Node) -> bool:
    """Tell whether a product of two values, neither a matrix of weights, is among a node's nearest sources.

    The search ends at linear layers: the scores of a router are one, and attention may lie behind it.
    """
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < _NEAR:
        here = waiting.popleft()
        if _operation(here) in _PRODUCTS:
            factors = [value_of(factor) for factor in here.all_input_nodes][-2:]
            if all(isinstance(factor, torch.Tensor) and factor.ndim >= 3 for factor in factors):
                return True
            continue
        if _operation(here) in ("linear", "addmm", "mm"):
            continue
        new = [source for source in here.all_input_nodes if source not in seen]
        seen.update(new)
        waiting += new
    return False


def _costs(pattern: Pattern, length: int) -> str:
    share = pattern.share(length)
    if share == 1:
        return f"dense, because {pattern.local} blocks of {pattern.block} tokens are all of {length}"
    return (
        f"sparse, {pattern.patterns} patterns, stride {pattern.stride}: {share:.0%} of the blocks at a length of "
        f"{length}, so at most {1 / share:.1f} times as fast, and {pattern.cache_share(length):.0%} of a cache"
    )
