"""Attention alone, forward and with its backward, beside causal SDPA."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention.timing import Call, measure, pattern_of, ratios, said
from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.attention.s2_masks import visible

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# What others say, to be read beside these numbers; other hardware, other baselines.
PAPER = (
    "paper (arXiv 2407.17678, version 7): attention 8.8, 15.9 and 25.3 times as fast as FlashAttention-2 at 128k, "
    "inference 4.5 times (7B); workshop abstract (OpenReview AhlE339I7o): training 2.8 (1.3B) and 2.5 (7B) times. "
    "The stride bounds all of it, and heads with patterns of their own bound the stride: with 16 local blocks of 64, "
    "attention at 128k is at most 13.0 times as fast with a stride of 16, 21.6 with 32 and 32.3 with 64"
)


def run(lengths: list[int], rounds: int, *, with_flex: bool, heads: int = 16, width: int = 64) -> list[Any]:
    """Forward and backward at every length."""
    found = []
    for length in lengths:
        torch.manual_seed(0)
        # Token by token in memory, as projections make them.
        q, k, v, grad = (torch.randn(1, length, heads, width).transpose(1, 2) for _ in range(4))
        p = pattern_of(length, heads)
        scale = width**-0.5

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def sparse(q: Tensor, k: Tensor, v: Tensor, p: Pattern = p, scale: float = scale) -> Tensor:
            out: Tensor = torch.ops.hecate.s2_attention(q, k, v, None, p.numbers, scale)[0]
            return out

        with torch.no_grad():
            systems: dict[str, Call] = {
                "dense": lambda q=q, k=k, v=v, f=dense: f(q, k, v),
                "s2": lambda q=q, k=k, v=v, f=sparse: f(q, k, v),
            }
            if with_flex:
                systems["flex"] = flex(q, k, v, p)
                error = float((systems["flex"]() - systems["s2"]()).abs().max())
                assert error < 1e-4, error
            forward = measure(systems, rounds)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def both(f: Callable[..., Tensor], leaves: list[Tensor] = leaves, grad: Tensor = grad) -> Call:
            return lambda: torch.autograd.grad(f(*leaves), leaves, grad)

        # Dense attention forward and backward at 32,768 tokens takes minutes.
        backward = measure({"dense": both(dense), "s2": both(sparse)}, rounds if length <= 16384 else 1)
        found.append(
            {"length": length, "share": p.share(length), "pattern": p.numbers, "forward": forward, "both": backward}
        )
        print(f"alone, {length}: done", flush=True)
    return found


def table(rows: list[Any]) -> list[str]:
    lines = [
        "",
        "16 heads of 64, float32: times as fast as causal SDPA, in brackets the launches",
        "",
        "| tokens | blocks | bound | forward | forward and backward | of the bound | flex, forward |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        forward, both = (ratios(row[key], "s2", "dense") for key in ("forward", "both"))
        bound = 1 / row["share"]
        other = said(ratios(row["forward"], "flex", "dense")) if "flex" in row["forward"] else "-"
        lines.append(
            f"| {row['length']:,} | {row['share']:.1%} | {bound:.1f} | {said(forward)} | {said(both)} | "
            f"{statistics.median(both) / bound:.0%} | {other} |"
        )
    return [*lines, "", PAPER]


def flex(q: Tensor, k: Tensor, v: Tensor, p: Pattern) -> Call:
    """Compiled flex_attention with the same blocks."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = block_mask(q.shape[2], p, q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask)


def block_mask(length: int, p: Pattern, device: torch.device) -> BlockMask:
    """The pattern for flex_attention: blocks that are seen whole, and those on the diagonal."""
    from torch.nn.attention.flex_attention import BlockMask

    n = p.blocks_of(length)
    seen = visible(p.patterns, n, n, Pattern(1, p.local, p.stride, p.offset, p.patterns), device)[None]
    whole = seen.tril(-1).int()
    diagonal = seen.int() - whole
    # The numbers of the blocks that are there stand first.
    order, own = (blocks.argsort(dim=-1, descending=True, stable=True).int() for blocks in (whole, diagonal))
    return BlockMask.from_kv_blocks(
        diagonal.sum(-1).int(),
        own,
        whole.sum(-1).int(),
        order,
        BLOCK_SIZE=p.block,
        mask_mod=lambda b, h, query, key: query >= key,
        seq_lengths=(length, length),
    )
