"""A tiny model of every MoE family in transformers, from a config: two layers, eight experts, random weights."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.families.table import FAMILIES, TEXT, VOCABULARY, Family

# Set where a family's config knows the name.
_TINY: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=48,
    max_position_embeddings=256,
    model_max_length=256,
    initializer_range=0.1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    sliding_window=16,
    # experts
    num_experts=8,
    n_routed_experts=8,
    num_local_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    moe_k=2,
    moe_topk=2,
    top_k_experts=2,
    n_shared_experts=1,
    num_shared_experts=1,
    moe_num_shared_experts=1,
    n_group=1,
    topk_group=1,
    num_expert_group=1,
    first_k_dense_replace=0,
    num_dense_layers=0,
    moe_layer_start_index=0,
    moe_layer_end_index=1,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    mlp_layer_types=["sparse", "sparse"],
    shared_expert_intermediate_size=48,
    shared_intermediate_size=48,
    shared_experts_intermediate_size=48,
    moe_shared_expert_intermediate_size=48,
    share_expert_dim=48,
    router_aux_loss_coef=0.001,
    router_jitter_noise=0.0,
    input_jitter_noise=0.0,
    num_nextn_predict_layers=0,
    # latent and sparse attention
    kv_lora_rank=16,
    q_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    index_topk=64,
    index_head_dim=16,
    index_n_heads=2,
    # linear attention and state spaces
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_head_dim=16,
    linear_num_heads=4,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=16,
    mamba_chunk_size=16,
    mamba_num_heads=8,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
    chunk_size=16,
    mamba_dt_rank=4,
    use_mamba_kernels=False,
)


# Sub-configs of a wrapper that are not text.
_TINY_OTHER: dict[str, Any] = dict(
    depth=1,
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    out_hidden_size=64,
    image_size=56,
    deepstack_visual_indexes=[0],
    num_position_embeddings=16,
    encoder_layers=1,
    encoder_attention_heads=2,
    encoder_ffn_dim=48,
    d_model=32,
    output_dim=64,
    downsample_hidden_size=16,
    text_hidden_size=64,
    projection_hidden_dim=48,
    projector_input_dim=32,
    projector_output_dim=32,
    vision_output_dim=32,
    position_embedding_size=64,
)


def build(name: str, *, seed: int = 0) -> nn.Module:
    """The model, in training mode; the same weights for the same seed in every process.

    Raises:
        LookupError: transformers has no such family.
    """
    family = FAMILIES[name]
    config = _wrapper_config(family) if family.text else _config(name, family)
    made = _class(family.model)
    torch.manual_seed(seed)
    model: nn.Module = made._from_config(config) if hasattr(made, "_from_config") else made(config)
    if "For" not in family.model:
        model = _WithHead(model, config.hidden_size)
    return model.train()


def batch(name: str, step: int, *, rows: int = 2, length: int = 24) -> dict[str, Any]:
    """Keyword arguments of the forward: token ids ``[rows, length]`` and labels, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    given: dict[str, Any] = dict(input_ids=ids, labels=ids % 2 if "Token" in FAMILIES[name].model else ids.clone())
    return given if FAMILIES[name].own_batch else given | dict(use_cache=False)


class _WithHead(nn.Module):
    """A text model without a head gets one, and a cross-entropy."""

    def __init__(self, body: nn.Module, hidden: int) -> None:
        super().__init__()
        self.body = body
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> dict[str, torch.Tensor]:
        hidden = self.body(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        logits = self.lm_head(hidden[:, :-1])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def _config(name: str, family: Family) -> Any:
    made = _class(family.config)
    if name == "dbrx":
        return _dbrx_config(made)
    base = made()
    chosen = {key: value for key, value in _TINY.items() if _has(base, key)}
    if _has(base, "qk_nope_head_dim"):
        del chosen["head_dim"]
    if getattr(base, "sliding_window", 16) in (None, 0) and name not in ("dots3_note_text", "step3p7_text"):
        del chosen["sliding_window"]
    kinds = getattr(base, "layer_types", None)
    if isinstance(kinds, (list, tuple)) and kinds and name != "jamba":
        # Two layers that show as many kinds as possible.
        different = list(dict.fromkeys(kinds))
        chosen["layer_types"] = (different * 2)[:2]
    if isinstance(getattr(base, "indexer_types", None), (list, tuple)) and base.indexer_types:
        chosen["indexer_types"] = ["full", "full"]
    for key in ("no_rope_layers", "kv_source_layers", "layer_rope_theta"):
        value = getattr(base, key, None)
        if isinstance(value, (list, tuple)) and value:
            chosen[key] = list(value[:2])
    return made(**(chosen | family.options))


def _dbrx_config(made: Any) -> Any:
    ffn = dict(hidden_size=64, ffn_hidden_size=48, moe_num_experts=8, moe_top_k=2)
    config = made(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        vocab_size=VOCABULARY,
        resid_pdrop=0.0,
        pad_token_id=0,
        initializer_range=0.1,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0),
        ffn_config=ffn,
    )
    config.attn_config.rope_theta = 10000.0
    return config


def _wrapper_config(family: Family) -> Any:
    made = _class(family.config)
    base, chosen, options = made(), dict[str, Any](), dict(family.options)
    for key in base.sub_configs:
        current = getattr(base, key, None)
        if key == "text_config":
            assert family.text is not None
            chosen[key] = _config(family.text, TEXT[family.text]).to_dict()
        elif current is not None:
            tiny = {name: value for name, value in _TINY_OTHER.items() if _has(current, name)}
            if isinstance(getattr(current, "layer_types", None), (list, tuple)):
                tiny["layer_types"] = list(current.layer_types[:1])
            chosen[key] = type(current)(**(tiny | options.pop(key, {}))).to_dict()
    # Ids that no batch has: all tokens are text.
    for thing in ("image", "video", "audio"):
        for kind in ("token_id", "token_index", "start_token_id", "end_token_id"):
            if _has(base, f"{thing}_{kind}"):
                chosen[f"{thing}_{kind}"] = 2
    for key, value in dict(vision_start_token_id=2, projector_hidden_size=48, out_hidden_size=64).items():
        if _has(base, key):
            chosen[key] = value
    return made(**(chosen | options))


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:
        # A property that needs more than a default config has.
        return True


def _class(name: str) -> Any:
    import transformers

    found = getattr(transformers, name, None)
    if found is not None:
        return found
    # Not every class is exported.
    if name not in _defined_in():
        raise LookupError(f"transformers {transformers.__version__} has no {name}")
    return getattr(importlib.import_module(_defined_in()[name]), name)


_EXPERTS = re.compile(r"^class \w*Experts\w*\(", re.MULTILINE)


@cache
def _defined_in() -> dict[str, str]:
    """The module of every class in transformers' models."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    found = {}
    for path in root.glob("*/*.py"):
        if path.name.startswith(("modeling_", "configuration_")):
            module = f"transformers.models.{path.parent.name}.{path.stem}"
            for line in path.read_text().splitlines():
                if line.startswith("class "):
                    found[line[6:].partition("(")[0].partition(":")[0].strip()] = module
    return found


def not_covered() -> list[str]:
    """Folders of transformers' models with a class of experts of which :data:`FAMILIES` has no model."""
    import transformers

    covered = {_class(family.model).__module__.split(".")[2] for family in FAMILIES.values()}
    root = Path(transformers.__file__).parent / "models"
    with_experts = {path.parent.name for path in root.glob("*/modeling_*.py") if _EXPERTS.search(path.read_text())}
    return sorted(with_experts - covered)
