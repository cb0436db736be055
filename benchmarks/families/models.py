"""A tiny model of every MoE family in transformers, from a config: two layers, eight experts, random weights.

Families are those whose text model has routed experts. :data:`TEXT` are text models; :data:`WRAPPERS` are models with
more inputs, whose forward is given text alone.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 128

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


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build one.

    Attributes:
        config: name of the config class.
        model: name of the model class.
        options: what its config needs beside :data:`_TINY`, or instead of it.
        text: of a wrapper, the name of the family inside.
        own_batch: whether the forward takes no ``use_cache``.
    """

    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    own_batch: bool = False


def _text(prefix: str, model: str = "ForCausalLM", *, config: str = "Config", **options: Any) -> Family:
    return Family(config=prefix + config, model=prefix + model, options=options)


def _body(prefix: str, **options: Any) -> Family:
    """A text model without a head."""
    return _text(prefix, "Model", **options)


_LATENT: dict[str, Any] = dict(num_key_value_heads=4)
_DEEPSEEK_V4: dict[str, Any] = dict(num_key_value_heads=1, o_groups=2, o_lora_rank=16, partial_rotary_factor=0.5)
_INKLING: dict[str, Any] = dict(
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    sliding_window_size=16,
    d_rel=8,
    rel_extent=64,
)


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=sections, **more))


TEXT: dict[str, Family] = {
    "afmoe": _text("Afmoe"),
    "aria_text": _text("AriaText"),
    "axk1": _text("AXK1", **_LATENT),
    "axk2": _text("AXK2", **_LATENT),
    "bailing_hybrid": _text("BailingHybrid", **_LATENT),
    "beam": _text("Beam"),
    "cohere2_moe": _text("Cohere2Moe"),
    "dbrx": _text("Dbrx"),
    "deepseek_ocr2_text": _body("DeepseekOcr2Text"),
    "deepseek_v2": _text("DeepseekV2", **_LATENT),
    "deepseek_v3": _text("DeepseekV3", **_LATENT),
    "deepseek_v32": _text("DeepseekV32", **_LATENT),
    "deepseek_v4": _text("DeepseekV4", **_DEEPSEEK_V4, mlp_layer_types=["moe", "moe"]),
    "deepseek_v4_hash": _text("DeepseekV4", **_DEEPSEEK_V4, mlp_layer_types=["hash_moe", "moe"]),
    "diffusion_gemma_text": _text("DiffusionGemma", "EncoderTextModel", config="TextConfig"),
    "doge": _text("Doge", is_moe=True, num_experts=16, num_experts_per_tok=4),
    "dots1": _text("Dots1"),
    "dots3_note_text": _text("Dots3Note", config="TextConfig", **_LATENT),
    "ernie4_5_moe": _text("Ernie4_5_Moe"),
    "ernie4_5_vl_moe_text": _body("Ernie4_5_VLMoeText", moe_intermediate_size=[48, 48], **_rope([3, 3, 2])),
    "exaone_moe": _text("ExaoneMoe"),
    "flex_olmo": _text("FlexOlmo"),
    "flint": _text("Flint"),
    "gemma4_text": _text(
        "Gemma4",
        config="TextConfig",
        enable_moe_block=True,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
    ),
    "glm4_moe": _text("Glm4Moe"),
    "glm4_moe_lite": _text("Glm4MoeLite", **_LATENT),
    "glm4v_moe_text": _body("Glm4vMoeText", **_rope([1, 1, 2], partial_rotary_factor=0.5)),
    "glm5_next_text": _body("Glm5NextText", **_LATENT, qk_rope_head_dim=0),
    "glm_moe_dsa": _text("GlmMoeDsa", **_LATENT),
    "gpt_oss": _text("GptOss"),
    "granitemoe": _text("GraniteMoe"),
    "granitemoe_swa": _text("GraniteMoeSWA"),
    "granitemoehybrid": _text("GraniteMoeHybrid"),
    "granitemoeshared": _text("GraniteMoeShared"),
    "hunyuan_v1_moe": _text("HunYuanMoEV1"),
    "hy_v3": _text("HYV3"),
    "hy_v4": _text("HYV4", **_LATENT),
    "hy_v4_vl_text": _body("HYV4VLText", **_LATENT, **_rope([1, 1, 2])),
    "inkling_text": _body("InklingText", **_INKLING),
    "inkling2_loop_text": _text(
        "Inkling2Loop",
        config="TextConfig",
        **_INKLING,
        unpadded_vocab_size=VOCABULARY,
        n_layers_per_attn_res_block=1,
        loop_layer_index_start=1,
        loop_layer_index_end=2,
        loop_num_passes=2,
        loop_gate_rank=8,
    ),
    "inkling2_text": _text("Inkling2", config="TextConfig", **_INKLING, unpadded_vocab_size=VOCABULARY),
    "jamba": _text("Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0),
    "jetmoe": _text("JetMoe", kv_channels=16, **_LATENT),
    "kimi_linear": _text("KimiLinear", **_LATENT),
    "kolibri1": _text("Kolibri1"),
    "lara_mini": _text("LaraMini"),
    "laguna": _text("Laguna", num_attention_heads_per_layer=[4, 4]),
    "lfm2_moe": _text("Lfm2Moe", layer_types=["conv", "full_attention"]),
    "llama4_text": _text(
        "Llama4",
        config="TextConfig",
        intermediate_size_mlp=48,
        num_experts_per_tok=1,
        attention_chunk_size=16,
        moe_layers=[0, 1],
        no_rope_layers=[1, 0],
    ),
    "longcat_flash": _text(
        "LongcatFlash",
        num_layers=2,
        **_LATENT,
        ffn_hidden_size=96,
        head_dim=8,
        expert_ffn_hidden_size=48,
        zero_expert_num=2,
    ),
    "mellum": _text("Mellum"),
    "mimo_v2_flash": _text("MiMoV2Flash"),
    "minimax": _text("MiniMax", block_size=16),
    "minimax_m2": _text("MiniMaxM2"),
    "minimax_m3_vl_text": _body("MiniMaxM3VLText", dense_intermediate_size=96, rotary_dim=8, index_block_size=16),
    "mistral4": _text("Mistral4", **_LATENT),
    "mistral_large4_text": _body("MistralLarge4Text", **_LATENT),
    "mixtral": _text("Mixtral"),
    "muse_spark_text": _body("MuseSparkText", moe_hidden_size=64, layer_rope_theta=[500000.0, 0]),
    "nemotron_h": _text(
        "NemotronH", layer_types=["linear_attention", "moe", "full_attention", "moe"], num_hidden_layers=4
    ),
    "nllb_moe": Family(
        config="NllbMoeConfig",
        model="NllbMoeForConditionalGeneration",
        own_batch=True,
        options=dict(
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_sparse_step=1,
            decoder_sparse_step=1,
            dropout=0.0,
            attention_dropout=0.0,
            moe_token_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            pad_token_id=1,
        ),
    ),
    "olmoe": _text("Olmoe"),
    "openai_privacy_filter": _text("OpenAIPrivacyFilter", "ForTokenClassification"),
    "phimoe": _text("Phimoe"),
    "qwen2_moe": _text("Qwen2Moe"),
    "qwen3_5_moe": _text("Qwen3_5Moe", config="TextConfig"),
    "qwen3_moe": _text("Qwen3Moe"),
    "qwen3_next": _text("Qwen3Next"),
    "qwen3_omni_moe_text": _text("Qwen3OmniMoe", "ThinkerTextModel", config="TextConfig"),
    "qwen3_vl_moe_text": _body("Qwen3VLMoeText"),
    "qwen4_exp_text": _text(
        "Qwen4Exp",
        config="TextConfig",
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=64,
        indexer_compress_ratio=4,
        hc_count=2,
        hc_lowrank=16,
        ple_embed_dim=32,
        ngram_vocab_size_base=64,
        heads_per_ngram=2,
        split_ngram_parts=2,
    ),
    "solar_open": _text("SolarOpen"),
    "step3p7_text": _body("Step3p7Text", num_sliding_attention_heads=4),
    "switch_transformers": Family(
        config="SwitchTransformersConfig",
        model="SwitchTransformersForConditionalGeneration",
        own_batch=True,
        options=dict(
            d_model=64,
            d_kv=16,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            num_sparse_encoder_layers=2,
            num_sparse_decoder_layers=2,
            dropout_rate=0.0,
            expert_capacity=4,
            decoder_start_token_id=0,
        ),
    ),
    "unlimited_ocr_text": _body("UnlimitedOcrText"),
    "zaya": _text("Zaya", num_experts_per_tok=1, router_hidden_size=16),
}


def _wrapper(prefix: str, text: str, model: str = "ForConditionalGeneration", config: str = "Config") -> Family:
    return Family(config=prefix + config, model=prefix + model, text=text)


# Not Llama4ForConditionalGeneration, whose own forward raises in transformers 5.24.
WRAPPERS: dict[str, Family] = {
    "aria": _wrapper("Aria", "aria_text"),
    "ernie4_5_vl_moe": _wrapper("Ernie4_5_VLMoe", "ernie4_5_vl_moe_text"),
    "gemma4": _wrapper("Gemma4", "gemma4_text"),
    "glm4v_moe": _wrapper("Glm4vMoe", "glm4v_moe_text"),
    "hy_v4_vl": _wrapper("HYV4VL", "hy_v4_vl_text"),
    "inkling2_loop": _wrapper("Inkling2Loop", "inkling2_loop_text"),
    "inkling2": _wrapper("Inkling2", "inkling2_text"),
    "qwen3_5_moe_vl": _wrapper("Qwen3_5Moe", "qwen3_5_moe"),
    "qwen3_omni_moe_thinker": _wrapper(
        "Qwen3OmniMoeThinker", "qwen3_omni_moe_text", model="ForConditionalGeneration"
    ),
    "qwen3_vl_moe": _wrapper("Qwen3VLMoe", "qwen3_vl_moe_text"),
    "qwen4_exp": _wrapper("Qwen4Exp", "qwen4_exp_text"),
    "step3p7": _wrapper("Step3p7", "step3p7_text"),
}

FAMILIES = TEXT | WRAPPERS

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
    base, chosen = made(), dict[str, Any]()
    for key in base.sub_configs:
        current = getattr(base, key, None)
        if key == "text_config":
            assert family.text is not None
            chosen[key] = _config(family.text, TEXT[family.text]).to_dict()
        elif current is not None:
            tiny = {name: value for name, value in _TINY_OTHER.items() if _has(current, name)}
            if isinstance(getattr(current, "layer_types", None), (list, tuple)):
                tiny["layer_types"] = list(current.layer_types[:1])
            chosen[key] = type(current)(**tiny).to_dict()
    # Ids that no batch has: all tokens are text.
    for thing in ("image", "video", "audio"):
        for kind in ("token_id", "token_index", "start_token_id", "end_token_id"):
            if _has(base, f"{thing}_{kind}"):
                chosen[f"{thing}_{kind}"] = 2
    for key, value in dict(vision_start_token_id=2, projector_hidden_size=48, out_hidden_size=64).items():
        if _has(base, key):
            chosen[key] = value
    return made(**chosen)


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
