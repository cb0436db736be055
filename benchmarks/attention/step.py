"""A training step in which attention is most of the work."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hecate
from benchmarks.attention.timing import Call, measure, pattern_of, ratios, said, seconds


def run(length: int, rounds: int) -> dict[str, Any]:
    """A small model end to end, dense and with S2 in both layers, compiled by Inductor."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    layers, heads, width = 2, 16, 64
    p = pattern_of(length, heads)
    options = hecate.S2Attention(block=p.block, local=p.local, stride=p.stride, dense_layers=())
    systems: dict[str, Call] = {}
    for name, attention in (("dense", None), ("s2", options)):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=64,
                hidden_size=128,
                moe_intermediate_size=64,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                head_dim=width,
                num_experts=8,
                num_experts_per_tok=2,
                max_position_embeddings=length,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        hecate.compile(model, hecate.Config(attention=attention))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(0))

        def train(model: nn.Module = model, optimizer: Any = optimizer, ids: Tensor = ids) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        systems[name] = train
    q, k, v, grad = (torch.randn(1, length, heads, width).transpose(1, 2).requires_grad_() for _ in range(4))

    def attention_alone() -> None:
        for _ in range(layers):
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    samples = measure(systems | {"attention of dense": attention_alone}, rounds)
    return {"length": length, "share": p.share(length), "samples": samples}


def table(found: dict[str, Any]) -> list[str]:
    samples, share = found["samples"], found["share"]
    part = statistics.median(ratios(samples, "dense", "attention of dense"))
    times = {name: seconds(samples, name) for name in samples}
    return [
        "",
        f"A training step of 2 layers, {found['length']:,} tokens, 16 heads of 64: dense {times['dense']:.1f} s, "
        f"S2 {times['s2']:.1f} s, {said(ratios(samples, 's2', 'dense'))} times as fast. Attention is {part:.0%} of "
        f"the dense step, so with {share:.1%} of the blocks the bound is {1 / (1 - part + part * share):.1f}",
    ]
