"""Keys and values that S2-Attention will need again, and the attention of one new token to them.

| operator | shapes | backward |
|---|---|---|
| ``s2_store`` | ``[b,Hk,T,D]?, [b,Hk,t,D], N -> [b,Hk,T',D]``, what is kept of N tokens and t new ones | none |
| ``s2_decode`` | ``[b,Hq,1,D], [b,Hk,T,D], [b,Hk,T,Dv], N, [1]? -> [b,Hq,1,Dv]``, of the last of N tokens | none |

A head keeps the blocks of its residue before the first local block, and then all tokens; a strided block that a head
does not have yet is zeros, which :func:`stored_visible` hides. T is :meth:`Pattern.stored` of N, T' of N + t, and t
is 1 after a prompt. Keys carry their positions already, so their order here says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.attention.s2_masks import stored_visible
from hecate.runtime.ops.registration import define


def _refuse_several(old: Tensor | None, new: Tensor) -> None:
    # Raised in the fake, too: while Dynamo traces, that ends the trace instead of cutting the model into pieces.
    if old is not None and new.shape[2] != 1:
        raise UnsupportedAttentionError(
            "hecate.S2Cache: several tokens came at once behind the prompt. It takes one prompt and then one token "
            "at a time; give the whole prompt to one forward, and make a new cache for another text"
        )


def _store(old: Tensor | None, new: Tensor, seen: int, numbers: Sequence[int]) -> Tensor:
    _refuse_several(old, new)
    pattern = Pattern(*numbers)
    block, stride = pattern.block, pattern.stride
    b, heads, count, width = new.shape
    tokens = seen + count
    first, leaving = pattern.first_local(seen), pattern.first_local(tokens) - pattern.first_local(seen)
    had, has = pattern.groups(seen), pattern.groups(tokens)
    out = new.new_empty((b, heads, pattern.stored(tokens), width))
    strided, local = out[:, :, : has * block].view(b, heads, has, block, width), out[:, :, has * block :]
    kept = new[:, :, :0] if old is None else old
    strided[:, :, :had] = kept[:, :, : had * block].view(b, heads, had, block, width)
    strided[:, :, had:] = 0
    before = kept[:, :, had * block :]
    if not leaving:
        local[:, :, : before.shape[2]] = before
        local[:, :, before.shape[2] :] = new
        return out
    recent = torch.cat([before, new], 2) if before.shape[2] else new
    gone = recent[:, :, : leaving * block].unflatten(2, (leaving, block))
    for head, residue in enumerate(pattern.residues(heads)):
        start = (residue - first) % stride
        mine = gone[:, head, start::stride]
        group = (first + start) // stride
        strided[:, head, group : group + mine.shape[1]] = mine
    local.copy_(recent[:, :, leaving * block :])
    return out


def _store_fake(old: Tensor | None, new: Tensor, seen: Any, numbers: Sequence[int]) -> Tensor:
    _refuse_several(old, new)
    b, heads, count, width = new.shape
    return new.new_empty((b, heads, Pattern(*numbers).stored(seen + count), width))


def _decode(
    q: Tensor, k: Tensor, v: Tensor, tokens: int, checked: Tensor | None, numbers: Sequence[int], scale: float
) -> Tensor:
    pattern = Pattern(*numbers)
    b, heads, _, width = q.shape
    key_heads = k.shape[1]
    # The query heads of a key head are rows of one product, so keys are read once.
    grouped = q.reshape(b, key_heads, heads // key_heads, width)
    mask = None
    if pattern.groups(tokens) * pattern.stride > pattern.first_local(tokens):
        there = stored_visible(key_heads, tokens, pattern, q.device)
        mask = torch.zeros(there.shape, dtype=q.dtype, device=q.device).masked_fill_(~there, float("-inf"))
        mask = mask[None, :, None].expand(b, -1, heads // key_heads, -1)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(b, heads, 1, v.shape[3]).contiguous()


define("s2_store(Tensor? old, Tensor new, SymInt seen, int[] pattern) -> Tensor", _store, _store_fake)
define(
    "s2_decode(Tensor q, Tensor k, Tensor v, SymInt tokens, Tensor? checked, int[] pattern, float scale) -> Tensor",
    _decode,
    lambda q, k, v, *_: q.new_empty((q.shape[0], q.shape[1], 1, v.shape[3])),
)


@register_flop_formula(torch.ops.hecate.s2_decode)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> Any:
    b, heads, _, width = q_shape
    return 2 * b * heads * k_shape[2] * (width + v_shape[3])
