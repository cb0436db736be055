"""S2-Attention's pattern as explicit masks, and the check of masks that are known only when they are there.

| operator | shapes | backward |
|---|---|---|
| ``s2_mask`` | ``[b,Hq,Sq,D], [b,Hk,Sk,D], [1]? -> [1,Hq,Sq,Sk]``, true where a query sees a key | none |
| ``s2_stored_mask`` | ``[b,Hq,1,D], [b,Hk,T,D], N, [1]? -> [1,Hq,1,T]``, the same for what a cache keeps | none |
| ``s2_check`` | ``[..., Sq, Sk] -> [1]``, raises unless a mask is causal | none |

Queries are the last Sq of Sk positions. ``checked`` is the result of ``s2_check``, or None; as an argument it puts
the check first and keeps it. ``pattern`` is :attr:`Pattern.numbers`; T is :meth:`Pattern.stored` of N tokens seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.comm.collectives import on_device
from hecate.runtime.ops.registration import define

# Elements of a mask that are compared at once.
_PIECE = 2**24


def visible(heads: int, queries: int, keys: int, pattern: Pattern, device: torch.device) -> Tensor:
    """Return which keys each of the last ``queries`` positions sees: bool ``[heads, queries, keys]``."""
    key = torch.arange(keys, device=device)
    query = key[keys - queries :, None]
    i, j = query // pattern.block, key // pattern.block
    residues = on_device(np.array(pattern.residues(heads)), device, constant=True)[:, None, None]
    return ((i - j < pattern.local) | (j % pattern.stride == residues)) & (key <= query)


def stored_visible(heads: int, tokens: int, pattern: Pattern, device: torch.device) -> Tensor:
    """Return which stored keys exist: bool ``[heads, T]``; some heads have a strided block less than others."""
    groups, first = pattern.groups(tokens), pattern.first_local(tokens)
    residues = on_device(np.array(pattern.residues(heads)), device, constant=True)[:, None]
    there = torch.arange(groups, device=device) * pattern.stride + residues < first
    local = torch.ones((heads, tokens - first * pattern.block), dtype=torch.bool, device=device)
    return torch.cat([there.repeat_interleave(pattern.block, 1), local], 1)


def _mask(q: Tensor, k: Tensor, checked: Tensor | None, pattern: Sequence[int]) -> Tensor:
    return visible(q.shape[1], q.shape[2], k.shape[2], Pattern(*pattern), q.device)[None]


def _stored_mask(q: Tensor, k: Tensor, tokens: int, checked: Tensor | None, pattern: Sequence[int]) -> Tensor:
    return stored_visible(q.shape[1], tokens, Pattern(*pattern), q.device)[None, :, None]


def _check(layer: str, mask: Tensor) -> Tensor:
    queries, keys = mask.shape[-2:]
    step = max(1, _PIECE // max(1, keys * math.prod(mask.shape[:-2])))
    key = torch.arange(keys, device=mask.device)
    for first in range(0, queries, step):
        rows = mask[..., first : first + step, :]
        query = torch.arange(first, first + rows.shape[-2], device=mask.device)
        # A single query is the last token, which sees all keys.
        wanted = key <= query[:, None] if queries > 1 else torch.ones_like(key, dtype=torch.bool)
        if not bool((rows == wanted).all()):
            raise UnsupportedAttentionError(
                f"hecate: {layer} got a mask that is not the causal one, and S2-Attention has its own. Of a batch "
                "with padding give rows of equal length one by one: a shift by padding would shift the blocks. "
                "Packed sequences, windows and static caches, which have room for keys to come, are not supported"
            )
    return mask.new_zeros(1)


define(
    "s2_mask(Tensor q, Tensor k, Tensor? checked, int[] pattern) -> Tensor",
    _mask,
    lambda q, k, *_: q.new_empty((1, q.shape[1], q.shape[2], k.shape[2]), dtype=torch.bool),
)
define(
    "s2_stored_mask(Tensor q, Tensor k, SymInt tokens, Tensor? checked, int[] pattern) -> Tensor",
    _stored_mask,
    lambda q, k, *_: q.new_empty((1, q.shape[1], 1, k.shape[2]), dtype=torch.bool),
)
define("s2_check(str layer, Tensor mask) -> Tensor", _check, lambda layer, mask: mask.new_empty(1))
