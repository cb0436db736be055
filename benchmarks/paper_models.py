"""The paper's models in full size, for ``hecate simulate benchmarks/paper_models.py:gpt_moe_s``.

GShard top 2, every layer MoE, 64 experts (paper, section 5). An expert has three matrices of together the size of the
paper's two. A rank's batch is 8,192 tokens, which the paper does not say. Weights stay on the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TOKENS = 8192


def gpt_moe_s() -> tuple[nn.Module, dict[str, Any]]:
    return _build(hidden=768, sequence=2048, layers=12)


def gpt_moe_s_32() -> tuple[nn.Module, dict[str, Any]]:
    """With 32 experts, as the paper has it on 16 GPUs, and as the recorded traces have."""
    return _build(hidden=768, sequence=2048, layers=12, experts=32)


def gpt_moe_l() -> tuple[nn.Module, dict[str, Any]]:
    return _build(hidden=1536, sequence=2048, layers=12)


def bert_moe() -> tuple[nn.Module, dict[str, Any]]:
    return _build(hidden=1024, sequence=512, layers=12)


def bert_moe_deep() -> tuple[nn.Module, dict[str, Any]]:
    return _build(hidden=1024, sequence=512, layers=24)


def modern() -> tuple[nn.Module, dict[str, Any]]:
    """Many small experts, as in Qwen3-MoE: top 8 of 128, of which each is small; 4 layers stand for more."""
    return _build(hidden=2048, sequence=4096, layers=4, ffn=768, experts=128, top_k=8)


def _build(
    *, hidden: int, sequence: int, layers: int, ffn: int | None = None, experts: int = 64, top_k: int = 2
) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=ffn or round(4 * hidden / 3 / 8) * 8,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=top_k,
        max_position_embeddings=sequence,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(TOKENS // sequence, sequence, dtype=torch.int64)
    return model.train(), {"input_ids": ids, "labels": ids}
