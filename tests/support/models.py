"""Tiny models of every supported family, built from configs with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 96
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def transformers_config(family: str, **changes: Any) -> Any:
    """A two-layer config with 8 experts, top 2; llama has none."""
    import transformers

    specific: dict[str, dict[str, Any]] = {
        "mixtral": dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2),
        "qwen3_moe": dict(
            intermediate_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, head_dim=8
        ),
        "olmoe": dict(intermediate_size=16, num_experts=8, num_experts_per_tok=2),
        "deepseek_v3": dict(
            intermediate_size=32,
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=2,
            first_k_dense_replace=0,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            num_key_value_heads=4,
        ),
        "llama": dict(intermediate_size=32),
        "gpt_oss": dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, head_dim=8),
    }
    return transformers.AutoConfig.for_model(family, **(_COMMON | specific[family] | changes))


class PlainMoE(nn.Module):
    """Experts as a user writes them: fused parameters, a Python loop, nothing from any library."""

    def __init__(self, hidden: int, intermediate: int, experts: int, choices: int) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(hidden, experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(experts, hidden, intermediate) * hidden**-0.5)
        self.w_out = nn.Parameter(torch.randn(experts, intermediate, hidden) * intermediate**-0.5)
        self.b_out = nn.Parameter(torch.randn(experts, hidden) * 0.1)

    def choose(self, tokens: torch.Tensor) -> Any:
        return self.router(tokens).softmax(-1).topk(self.choices, dim=-1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        out = torch.zeros_like(tokens)
        for expert in range(self.w_in.shape[0]):
            token, choice = torch.where(chosen == expert)
            h = torch.nn.functional.silu(tokens[token] @ self.w_in[expert])
            h = h @ self.w_out[expert] + self.b_out[expert]
            out.index_add_(0, token, h * weights[token, choice, None])
        return out.view_as(hidden)


class SplitMoE(PlainMoE):
    """The same experts on sorted rows, split by counts that are read on the host."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.choices, dim=-1)
        order = chosen.reshape(-1).argsort(stable=True)
        experts = torch.arange(self.w_in.shape[0], device=chosen.device)
        counts = (chosen.reshape(-1, 1) == experts).sum(0).tolist()
        parts = torch.split(tokens[order // self.choices], counts)
        outs = []
        for expert, part in enumerate(parts):
            h = torch.nn.functional.silu(torch.nn.functional.linear(part, self.w_in[expert].t()))
            outs.append(torch.nn.functional.linear(h, self.w_out[expert].T, self.b_out[expert]))
        rows = torch.cat(outs) * weights.reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.choices, rows).view_as(hidden)


class PlainLanguageModel(nn.Module):
    """Embedding, MoE blocks with residuals, a tied head, and a loss, in plain PyTorch.

    Args:
        turns: how often a forward goes through the blocks.
    """

    def __init__(
        self, moe: type[PlainMoE] = PlainMoE, hidden: int = 32, layers: int = 2, experts: int = 8, turns: int = 1
    ) -> None:
        super().__init__()
        self.turns = turns
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.blocks = nn.ModuleList(moe(hidden, 16, experts, 2) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for _ in range(self.turns):
            for norm, block in zip(self.norms, self.blocks, strict=True):
                hidden = hidden + block(norm(hidden))
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "plain", "split")


def build(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2, turns: int = 1, **changes: Any
) -> nn.Module:
    """The same weights for the same seed, in every process.

    Args:
        turns: how often a forward goes through the layers.
    """
    torch.manual_seed(seed)
    if family in ("plain", "split"):
        model: nn.Module = PlainLanguageModel(
            SplitMoE if family == "split" else PlainMoE, layers=layers, turns=turns, **changes
        )
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(transformers_config(family, num_hidden_layers=layers, **changes))
        with torch.no_grad():
            # The families start with a std of 0.02 and zero biases; larger values make errors visible.
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.2)
        if turns > 1:
            # A cache would take the same layer for one that has seen the tokens.
            model.config.use_cache, model.config.num_hidden_layers = False, layers * turns
            if getattr(model.config, "layer_types", None):
                model.config.layer_types = model.config.layer_types * turns
            model.model.layers = nn.ModuleList([*model.model.layers] * turns)
    return model.to(dtype)


def batch(step: int, *, rows: int = 12, length: int = 16) -> torch.Tensor:
    """Token ids ``[rows, length]``, the same in every process; other tokens, so other routing, at each step."""
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1000 + step))
