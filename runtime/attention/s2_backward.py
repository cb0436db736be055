"""Gradients of S2-Attention on a GPU: one kernel for keys and values, one for queries.

A program owns the tile that it writes: nothing is added by several, so equal inputs give equal gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.attention.s2_forward import (
    PRECISION,
    arguments_of,
    prepared,
    residue_of,
    strided_tile,
    strided_tiles,
)
from hecate.runtime.kernels.launch import launch


@triton.jit
def _rows_of(a_ptr, b_ptr, tile, length, B: tl.constexpr, D: tl.constexpr):
    """Return a tile's tokens, which of them exist, the addresses of their rows, and the rows of both operands."""
    tokens = tile * B + tl.arange(0, B)
    there = tokens < length
    at = tokens.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    a = tl.load(a_ptr + at, mask=there[:, None], other=0.0)
    b = tl.load(b_ptr + at, mask=there[:, None], other=0.0)
    return tokens, there, at, a, b


@triton.jit
def _of_keys(
    Q, Grad, Lse, Delta, base, i, k, v, dk, dv, length, scale, OWN: tl.constexpr, B: tl.constexpr, D: tl.constexpr
):
    """Add one tile of queries, of a head whose rows begin at ``base``; the own tile has the tokens of the keys."""
    rows, there, _, q, grad = _rows_of(Q + base * D, Grad + base * D, i, length, B, D)
    # A row that does not exist has weights exp(-inf) = 0.
    lse = tl.load(Lse + base + rows, mask=there, other=float("inf"))
    delta = tl.load(Delta + base + rows, mask=there, other=0.0)
    weights = tl.exp(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
    if OWN:
        weights = tl.where(rows[:, None] >= rows[None, :], weights, 0.0)
    dv += tl.dot(tl.trans(weights).to(grad.dtype), grad, input_precision=PRECISION)
    of_scores = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None]) * scale
    dk += tl.dot(tl.trans(of_scores).to(q.dtype), q, input_precision=PRECISION)
    return dk, dv


@triton.jit
def s2_backward_keys(
    Q,
    K,
    V,
    Grad,
    Lse,
    Delta,
    DK,
    DV,
    length,
    heads,
    shared,
    same,
    local,
    stride,
    step,
    offset,
    scale,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
):
    """Sum over the heads of queries that share a head of keys; shapes and arguments as in ``s2_forward``."""
    tiles = tl.cdiv(length, B)
    tile = tl.program_id(0) % tiles
    j = tile // PARTS
    row = tl.program_id(0) // tiles
    key_heads = heads // shared
    of_keys = row.to(tl.int64) * length * D
    _, there, at, k, v = _rows_of(K + of_keys, V + of_keys, tile, length, B, D)
    dk = tl.zeros([B, D], tl.float32)
    dv = tl.zeros([B, D], tl.float32)
    for number in range(0, shared):
        head = (row % key_heads) * shared + number
        base = ((row // key_heads) * heads + head).to(tl.int64) * length
        residue = residue_of(head, same, stride, step, offset)
        # A block of the residue is seen by all later ones, any other by those to which it is local.
        end = tl.where(j % stride == residue, tiles, tl.minimum((j + local) * PARTS, tiles))
        dk, dv = _of_keys(Q, Grad, Lse, Delta, base, tile, k, v, dk, dv, length, scale, True, B, D)
        for i in range(tile + 1, end):
            dk, dv = _of_keys(Q, Grad, Lse, Delta, base, i, k, v, dk, dv, length, scale, False, B, D)
    tl.store(DK + of_keys + at, dk.to(DK.dtype.element_ty), mask=there[:, None])
    tl.store(DV + of_keys + at, dv.to(DV.dtype.element_ty), mask=there[:, None])


@triton.jit
def _of_queries(
    k_ptr, v_ptr, j, q, grad, lse, delta, dq, length, scale, OWN: tl.constexpr, B: tl.constexpr, D: tl.constexpr
):
    keys, there, _, k, v = _rows_of(k_ptr, v_ptr, j, length, B, D)
    weights = tl.exp(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
    if OWN:
        weights = tl.where((keys[:, None] >= keys[None, :]) & there[None, :], weights, 0.0)
    of_scores = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None]) * scale
    return dq + tl.dot(of_scores.to(k.dtype), k, input_precision=PRECISION)


@triton.jit
def s2_backward_queries(
    Q,
    K,
    V,
    Grad,
    Lse,
    Delta,
    DQ,
    length,
    heads,
    shared,
    same,
    local,
    stride,
    step,
    offset,
    scale,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
):
    """Compute gradients of queries; shapes and arguments as in ``s2_forward``."""
    tiles = tl.cdiv(length, B)
    tile = tiles - 1 - tl.program_id(0) % tiles
    i = tile // PARTS
    row = tl.program_id(0) // tiles
    head = row % heads
    of_keys = (row // heads) * (heads // shared) + head // shared
    base = row.to(tl.int64) * length
    K += of_keys.to(tl.int64) * length * D
    V += of_keys.to(tl.int64) * length * D
    rows, there, at, q, grad = _rows_of(Q + base * D, Grad + base * D, tile, length, B, D)
    lse = tl.load(Lse + base + rows, mask=there, other=float("inf"))
    delta = tl.load(Delta + base + rows, mask=there, other=0.0)
    dq = tl.zeros([B, D], tl.float32)
    residue = residue_of(head, same, stride, step, offset)
    for number in range(0, strided_tiles(i, residue, local, stride, PARTS)):
        j = strided_tile(number, residue, stride, PARTS)
        dq = _of_queries(K, V, j, q, grad, lse, delta, dq, length, scale, False, B, D)
    for j in range(tl.maximum(i - local + 1, 0) * PARTS, tile):
        dq = _of_queries(K, V, j, q, grad, lse, delta, dq, length, scale, False, B, D)
    dq = _of_queries(K, V, tile, q, grad, lse, delta, dq, length, scale, True, B, D)
    tl.store(DQ + base * D + at, dq.to(DQ.dtype.element_ty), mask=there[:, None])


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Pattern, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, of their shapes; arguments as in ``s2_blocks.backward``."""
    b, heads, _, _ = q.shape
    tiles, numbers, constants = arguments_of(q, k, v, pattern, scale)
    delta = (out.float() * grad.float()).sum(-1).contiguous()
    wide_grad, wide_q, wide_k, wide_v = (prepared(x, constants["D"]) for x in (grad, q, k, v))
    dq, dk, dv = (torch.empty_like(x) for x in (wide_q, wide_k, wide_v))
    given = (wide_q, wide_k, wide_v, wide_grad, lse.contiguous(), delta)
    launch(s2_backward_keys, lambda meta: tiles * b * k.shape[1], *given, dk, dv, *numbers, **constants)
    launch(s2_backward_queries, lambda meta: tiles * b * heads, *given, dq, *numbers, **constants)
    dq, dk, dv = (x[..., : like.shape[3]].contiguous() for x, like in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv
