"""The kinds of model that are exported and loaded, and whether two state dicts are the same."""

from __future__ import annotations

import torch
from torch import nn

from tests.hecate_compile.wrap.test_stack_experts import DictMoE, small
from tests.support.models import build, transformers_config

_PRETRAINED = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")
KINDS = (*_PRETRAINED, "tied", "plain", "list")
State = dict[str, torch.Tensor]


def model_of(kind: str, seed: int = 0) -> nn.Module:
    if kind == "list":
        return small(DictMoE, seed=seed)
    if kind == "tied":
        return build("qwen3_moe", seed=seed, layers=1, tie_word_embeddings=True)
    return build(kind, seed=seed, layers=1)


def on_meta(kind: str) -> nn.Module:
    """The same architecture without storage."""
    from transformers import AutoModelForCausalLM

    changes = {"tie_word_embeddings": True} if kind == "tied" else {}
    family = "qwen3_moe" if kind == "tied" else kind
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            transformers_config(family, num_hidden_layers=1, **changes)
        )
    return model


def is_pretrained(kind: str) -> bool:
    return kind in _PRETRAINED or kind == "tied"


def same(ours: State, theirs: State) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == t.dtype and torch.equal(ours[name], t) for name, t in theirs.items()
    )
