"""S2-Attention on a GPU: one program for each tile of queries of each head.

A tile is a block of the pattern, or a part of one where a block has no room in a multiprocessor. Source: online
softmax, FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.kernels.launch import launch, on_amd

# float32 is multiplied as three products of TF32, which keep 22 of its 24 bits: number by number, the compiler for
# NVIDIA takes minutes. AMD's has instructions for float32, and no three products.
PRECISION = tl.constexpr("ieee" if on_amd() else "tf32x3")


@triton.jit
def residue_of(head, same, stride, step, offset):
    """Return the first block from which on a head sees every ``stride``-th of the blocks before the local ones."""
    return (stride - ((head // same) * step + offset) % stride) % stride


@triton.jit
def strided_tiles(i, residue, local, stride, PARTS: tl.constexpr):
    """Return how many tiles of keys a head's strided blocks have in front of the local blocks of block ``i``."""
    return (tl.maximum(i - local - residue + stride, 0) // stride) * PARTS


@triton.jit
def strided_tile(number, residue, stride, PARTS: tl.constexpr):
    """Return the tile of keys that is a head's strided tile with this number."""
    return (residue + number // PARTS * stride) * PARTS + number % PARTS


@triton.jit
def _look(q, k_ptr, v_ptr, j, out, most, total, length, scale, OWN: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    """Add one tile of keys; in the own tile, whose tokens the queries are, each sees the keys up to itself."""
    keys = j * B + tl.arange(0, B)
    d = tl.arange(0, D)
    there = keys < length
    at = keys.to(tl.int64)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + at, mask=there[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if OWN:
        scores = tl.where((keys[:, None] >= keys[None, :]) & there[None, :], scores, float("-inf"))
    larger = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp(scores - larger[:, None])
    shrunk = tl.exp(most - larger)
    v = tl.load(v_ptr + at, mask=there[:, None], other=0.0)
    out = out * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return out, larger, total * shrunk + tl.sum(weights, 1)


@triton.jit
def s2_forward(
    Q,
    K,
    V,
    Out,
    Lse,
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
    """Compute attention of ``Q [b, heads, length, D]``, ``K`` and ``V [b, heads / shared, length, D]`` without gaps.

    ``same`` heads of queries have one pattern. A tile has ``B`` tokens, a block ``PARTS`` tiles.
    """
    # The last tiles have most to do, so they start first.
    tiles = tl.cdiv(length, B)
    tile = tiles - 1 - tl.program_id(0) % tiles
    i = tile // PARTS
    row = tl.program_id(0) // tiles
    head = row % heads
    of_keys = (row // heads) * (heads // shared) + head // shared
    Q += row.to(tl.int64) * length * D
    Out += row.to(tl.int64) * length * D
    Lse += row.to(tl.int64) * length
    K += of_keys.to(tl.int64) * length * D
    V += of_keys.to(tl.int64) * length * D
    rows = tile * B + tl.arange(0, B)
    d = tl.arange(0, D)
    at = rows.to(tl.int64)[:, None] * D + d[None, :]
    q = tl.load(Q + at, mask=(rows < length)[:, None], other=0.0)
    most = tl.full([B], float("-inf"), tl.float32)
    total = tl.zeros([B], tl.float32)
    out = tl.zeros([B, D], tl.float32)
    residue = residue_of(head, same, stride, step, offset)
    for number in range(0, strided_tiles(i, residue, local, stride, PARTS)):
        j = strided_tile(number, residue, stride, PARTS)
        out, most, total = _look(q, K, V, j, out, most, total, length, scale, False, B, D)
    for j in range(tl.maximum(i - local + 1, 0) * PARTS, tile):
        out, most, total = _look(q, K, V, j, out, most, total, length, scale, False, B, D)
    out, most, total = _look(q, K, V, tile, out, most, total, length, scale, True, B, D)
    tl.store(Out + at, (out / total[:, None]).to(Out.dtype.element_ty), mask=(rows < length)[:, None])
    tl.store(Lse + rows, most + tl.log(total), mask=rows < length)


def prepared(x: Tensor, width: int) -> Tensor:
    """Return ``x`` padded with zeros, which change no product, to one width, without gaps."""
    return (F.pad(x, (0, width - x.shape[3])) if x.shape[3] != width else x).contiguous()


def arguments_of(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float
) -> tuple[int, tuple[Any, ...], dict[str, int]]:
    """Return the tiles of a head, and numbers and constants that all kernels take behind the tensors."""
    (_, heads, length, _), itemsize = q.shape, q.element_size()
    width: int = triton.next_power_of_2(max(16, q.shape[3], v.shape[3]))
    # With two bytes a number, 128 rows of 128 numbers have room in a multiprocessor of capability 8.0. With float32,
    # operands of three products lie in registers, into which larger tiles do not fit (seen in code compiled for 9.0).
    tile = min(pattern.block, min(128, 8192 // width) if itemsize == 2 else max(16, 1024 // width))
    shared, same = heads // k.shape[1], heads // pattern.patterns
    numbers = (length, heads, shared, same, pattern.local, pattern.stride, pattern.step, pattern.offset, scale)
    constants = {
        "B": tile,
        "PARTS": pattern.block // tile,
        "D": width,
        # Not tuned on any GPU. Registers of four warps have no room for a tile of 128 times 64 numbers (code compiled
        # for capability 9.0).
        "num_warps": 4 if width <= 64 and tile < 128 else 8,
        "num_stages": 2 if itemsize == 2 and tile * width <= 8192 else 1,
    }
    return -(-length // tile), numbers, constants


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention, and the logarithm of each row's sum; shapes as in ``s2_blocks.forward``."""
    b, heads, length, _ = q.shape
    tiles, numbers, constants = arguments_of(q, k, v, pattern, scale)
    padded = [prepared(x, constants["D"]) for x in (q, k, v)]
    out = torch.empty_like(padded[0])
    lse = q.new_empty((b, heads, length), dtype=torch.float32)
    # One line of programs: the others of a grid hold 65,535.
    launch(s2_forward, lambda meta: tiles * b * heads, *padded, out, lse, *numbers, **constants)
    return out[..., : v.shape[3]], lse
