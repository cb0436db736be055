"""S2-Attention on CPUs, made of torch's flash kernels for parts of the sequence; tensors are ``[b, H, S, D]``.

Three parts, each at the cost of its own blocks, merged by the logarithm of each row's sum as flash attention merges
its tiles:

- The first ``local`` blocks of queries are causal attention.
- Every later block sees a window of ``local`` blocks: overlapping views of keys, without a copy, and one mask.
- Strided blocks: keys of a head's residue are gathered, 1 / stride of all, and its queries shifted by the residue.
  Then all heads see the same stairs: the first ``stride`` blocks of queries one block of keys, the next ones two, and
  so on. Each step is one call without a mask.

The backward takes the merged output and logarithm, with which the weights of all parts sum to one, so the merge needs
no gradient. Every sum has one order, so equal inputs give equal gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.private import flash_for_cpu, flash_for_cpu_backward
from hecate.runtime.attention.pattern import Pattern

_flash = flash_for_cpu.default
_flash_backward = flash_for_cpu_backward.default

# Dtypes that the kernels take.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Elements of the keys' gradients that are there at once before they are added up: each key is in ``local`` windows.
_PIECE = 2**24


def sum_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of the logarithm of a row's sum."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class _Layout:
    """The blocks of each part, for one length and H heads of queries."""

    n: int  # blocks
    early: int  # tokens of the first local blocks
    late: int  # blocks after those
    steps: int  # of the stairs
    heads: Tensor  # [H, 1], to index with
    keys: Tensor  # [H, steps], strided blocks; where a head has none, any
    queries: Tensor  # [H, late], blocks in the order of the stairs; where a head has none, any
    query_there: Tensor  # [H, late]
    place: Tensor  # [H, late], where each late block of queries stands in that order
    on_stairs: Tensor  # [H, late], whether it sees any strided block
    counts: tuple[tuple[int, int], ...]  # of each head, its residue and its strided blocks that some query sees


@lru_cache(maxsize=64)
def _layout(heads: int, n: int, pattern: Pattern) -> _Layout:
    local, stride = min(pattern.local, n), pattern.stride
    late = n - local
    steps = -(-late // stride)
    residues = pattern.residues(heads)
    r = torch.tensor(residues, device="cpu")[:, None]
    x = torch.arange(late, device="cpu")
    queries = local + r + x
    place = x - r
    return _Layout(
        n=n,
        early=local * pattern.block,
        late=late,
        steps=steps,
        heads=torch.arange(heads, device="cpu")[:, None],
        keys=(r + torch.arange(steps, device="cpu") * stride).clamp(max=n - 1),
        queries=queries.clamp(max=n - 1),
        query_there=queries < n,
        place=place.clamp(min=0),
        on_stairs=place >= 0,
        counts=tuple((residue, len(range(residue, late, stride))) for residue in residues),
    )


def _prepared(x: Tensor, heads: int, tokens: int, width: int) -> Tensor:
    """Return ``x`` with a key head for each query head, whole blocks, one width and no gaps."""
    if x.shape[1] != heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    if (x.shape[2], x.shape[3]) != (tokens, width):
        # Zeros change nothing: no query before those at the end sees them, and in the width they add none to a
        # product.
        x = F.pad(x, (0, width - x.shape[3], 0, tokens - x.shape[2]))
    return x.contiguous()


def _windows(x: Tensor, layout: _Layout, pattern: Pattern) -> Tensor:
    """Return a view of the ``local`` blocks that end with each late block: ``[b H, late, local block, D]``."""
    b, heads, tokens, width = x.shape
    block = pattern.block * width
    return x.as_strided(
        (b * heads, layout.late, layout.early, width), (tokens * width, block, width, 1), x.storage_offset() + block
    )


def _window_mask(layout: _Layout, pattern: Pattern, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to a window's scores ``[1, 1, block, local block]``: its last block is causal."""
    query = torch.arange(layout.early - pattern.block, layout.early, device="cpu")[:, None]
    hidden = torch.arange(layout.early, device="cpu") > query
    mask = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, float("-inf"))
    return mask[None, None]


def _late(x: Tensor, layout: _Layout, pattern: Pattern) -> Tensor:
    return x[:, :, layout.early :].reshape(-1, layout.late, pattern.block, *x.shape[3:])


def _gather(x: Tensor, layout: _Layout, blocks: Tensor) -> Tensor:
    """Gather blocks of each head ``[b, H, count, block, ...]``, by their numbers ``[H, count]``."""
    b, heads, tokens = x.shape[:3]
    return x.view(b, heads, layout.n, tokens // layout.n, *x.shape[3:])[:, layout.heads, blocks]


def _stairs(layout: _Layout, pattern: Pattern) -> Iterator[tuple[slice, slice]]:
    """Yield queries and keys of each call, in tokens of the gathered ones."""
    wide = pattern.stride * pattern.block
    for step in range(layout.steps):
        queries = slice(step * wide, min((step + 1) * wide, layout.late * pattern.block))
        yield queries, slice(0, (step + 1) * pattern.block)


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention of ``[b, H, S, D]``, ``[b, Hk, S, D]`` and ``[b, Hk, S, Dv]``, Hk a divisor of H.

    Return ``[b, H, S, Dv]`` and the logarithm of each row's sum ``[b, H, S]``, in float32, or float64 for float64.
    """
    heads, length = q.shape[1:3]
    layout = _layout(heads, pattern.blocks_of(length), pattern)
    tokens, width, width_out = layout.n * pattern.block, max(q.shape[3], v.shape[3]), v.shape[3]
    q, k, v = (_prepared(x, heads, tokens, width) for x in (q, k, v))
    start = layout.early
    # It lies token by token, as torch's own attention lays it out.
    out = q.new_empty((q.shape[0], tokens, heads, width)).transpose(1, 2)
    lse = q.new_empty((q.shape[0], heads, tokens), dtype=sum_dtype(q))
    out[:, :, :start], lse[:, :, :start] = _flash(
        q[:, :, :start], k[:, :, :start], v[:, :, :start], 0.0, True, scale=scale
    )
    if layout.late:
        out[:, :, start:], lse[:, :, start:] = _late_forward(q, k, v, layout, pattern, scale)
    return out[:, :, :length, :width_out], lse[:, :, :length]


def _late_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: _Layout, pattern: Pattern, scale: float
) -> tuple[Tensor, Tensor]:
    b, heads, _, width = q.shape
    block = pattern.block
    mask = _window_mask(layout, pattern, q.dtype)
    near, near_lse = _flash(
        _late(q, layout, pattern),
        _windows(k, layout, pattern),
        _windows(v, layout, pattern),
        0.0,
        False,
        attn_mask=mask,
        scale=scale,
    )
    near = near.reshape(b, heads, layout.late, block, width)
    near_lse = near_lse.reshape(b, heads, layout.late, block)
    keys, values = (_gather(x, layout, layout.keys).flatten(2, 3) for x in (k, v))
    queries = _gather(q, layout, layout.queries).flatten(2, 3)
    far, far_lse = torch.empty_like(queries), near_lse.new_empty(queries.shape[:3])
    for of_queries, of_keys in _stairs(layout, pattern):
        far[:, :, of_queries], far_lse[:, :, of_queries] = _flash(
            queries[:, :, of_queries], keys[:, :, of_keys], values[:, :, of_keys], 0.0, False, scale=scale
        )
    far = far.view(b, heads, layout.late, block, width)[:, layout.heads, layout.place]
    far_lse = far_lse.view(b, heads, layout.late, block)[:, layout.heads, layout.place]
    far_lse = far_lse.masked_fill_(~layout.on_stairs[None, :, :, None], float("-inf"))
    lse = torch.logaddexp(near_lse, far_lse)
    out = near * (near_lse - lse).exp_().unsqueeze(-1).to(q.dtype)
    out.addcmul_(far, (far_lse - lse).exp_().unsqueeze(-1).to(q.dtype))
    return out.flatten(2, 3), lse.flatten(2, 3)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Pattern, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; shapes as in :func:`forward`, that of ``grad`` as of ``out``."""
    b, heads, length, width_in = q.shape
    key_heads, width_out = k.shape[1], v.shape[3]
    layout = _layout(heads, pattern.blocks_of(length), pattern)
    tokens, width = layout.n * pattern.block, max(width_in, width_out)
    grad, q, k, v, out = (_prepared(x, heads, tokens, width) for x in (grad, q, k, v, out))
    # A row that does not exist has weights exp(-inf) = 0.
    lse = F.pad(lse, (0, tokens - length), value=float("inf")).contiguous()
    gradients = tuple(torch.zeros_like(x) for x in (q, k, v))
    start = layout.early
    early = _flash_backward(*(x[:, :, :start] for x in (grad, q, k, v, out, lse)), 0.0, True, scale=scale)
    for total, part in zip(gradients, early, strict=True):
        total[:, :, :start] = part
    if layout.late:
        _add_windows(gradients, (grad, q, k, v, out, lse), layout, pattern, scale)
        _add_stairs(gradients, (grad, q, k, v, out, lse), layout, pattern, scale)
    dq, dk, dv = (x[:, :, :length] for x in gradients)
    if key_heads != heads:
        dk, dv = (x.reshape(b, key_heads, heads // key_heads, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq[..., :width_in].contiguous(), dk[..., :width_in].contiguous(), dv[..., :width_out].contiguous()


_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _add_windows(
    gradients: tuple[Tensor, ...], operands: _Six, layout: _Layout, pattern: Pattern, scale: float
) -> None:
    grad, q, k, v, out, lse = operands
    late = [_late(x, layout, pattern) for x in (grad, q, out, lse)]
    windows = [_windows(x, layout, pattern) for x in (k, v)]
    mask = _window_mask(layout, pattern, q.dtype)
    local = layout.early // pattern.block
    width = q.shape[3]
    by_row = [x.view(-1, layout.n, pattern.block, width) for x in gradients]
    step = max(1, _PIECE // (layout.late * layout.early * width))
    for first in range(0, late[0].shape[0], step):
        rows = slice(first, first + step)
        given, query, result, logarithm = (x[rows] for x in late)
        key, value = (x[rows] for x in windows)
        dq, dk, dv = _flash_backward(
            given, query, key, value, result, logarithm, 0.0, False, attn_mask=mask, scale=scale
        )
        by_row[0][rows, local:] += dq
        for total, part in ((by_row[1], dk), (by_row[2], dv)):
            by_block = part.reshape(-1, layout.late, local, pattern.block, width)
            for place in range(local):
                total[rows, 1 + place : 1 + place + layout.late] += by_block[:, :, place]


def _add_stairs(
    gradients: tuple[Tensor, ...], operands: _Six, layout: _Layout, pattern: Pattern, scale: float
) -> None:
    grad, q, k, v, out, lse = operands
    b, heads, _, width = q.shape
    block = pattern.block
    keys, values = (_gather(x, layout, layout.keys).flatten(2, 3) for x in (k, v))
    queries, outs = (_gather(x, layout, layout.queries).flatten(2, 3) for x in (q, out))
    there = layout.query_there[None, :, :, None]
    given = _gather(grad, layout, layout.queries).masked_fill_(~there[..., None], 0).flatten(2, 3)
    logarithms = _gather(lse, layout, layout.queries).masked_fill_(~there, float("inf")).flatten(2, 3)
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for of_queries, of_keys in _stairs(layout, pattern):
        part = _flash_backward(
            given[:, :, of_queries],
            queries[:, :, of_queries],
            keys[:, :, of_keys],
            values[:, :, of_keys],
            outs[:, :, of_queries],
            logarithms[:, :, of_queries],
            0.0,
            False,
            scale=scale,
        )
        dq[:, :, of_queries] = part[0]
        dk[:, :, of_keys] += part[1]
        dv[:, :, of_keys] += part[2]
    back = dq.view(b, heads, layout.late, block, width)[:, layout.heads, layout.place]
    back.masked_fill_(~layout.on_stairs[None, :, :, None, None], 0)
    gradients[0][:, :, layout.early :] += back.flatten(2, 3)
    for total, part in zip(gradients[1:], (dk, dv), strict=True):
        by_block = total.view(b, heads, layout.n, block, width)
        of_steps = part.view(b, heads, layout.steps, block, width)
        for head, (residue, count) in enumerate(layout.counts):
            seen = slice(residue, residue + count * pattern.stride, pattern.stride)
            by_block[:, head, seen] += of_steps[:, head, :count]
