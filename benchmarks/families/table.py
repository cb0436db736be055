"""The table of MoE families in transformers: classes of each, and what its tiny config needs.

Families are those whose text model has routed experts. :data:`TEXT` are text models; :data:`WRAPPERS` are models with
more inputs, whose forward is given text alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 128


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build one.

    Attributes:
        config: name of the config class.
        model: name of the model class.
        options: what its config needs beside, or instead of, what all have (:mod:`benchmarks.families.models`).
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


def _wrapper(prefix: str, text: str, **options: Any) -> Family:
    return Family(config=f"{prefix}Config", model=f"{prefix}ForConditionalGeneration", text=text, options=options)


# Not Llama4ForConditionalGeneration, whose own forward raises in transformers 5.24.
WRAPPERS: dict[str, Family] = {
    "aria": _wrapper("Aria", "aria_text", vision_config=dict(patch_size=14), projector_patch_to_query_dict={16: 4}),
    "ernie4_5_vl_moe": _wrapper("Ernie4_5_VLMoe", "ernie4_5_vl_moe_text"),
    "gemma4": _wrapper("Gemma4", "gemma4_text"),
    "glm4v_moe": _wrapper("Glm4vMoe", "glm4v_moe_text"),
    "hy_v4_vl": _wrapper("HYV4VL", "hy_v4_vl_text"),
    "inkling2_loop": _wrapper("Inkling2Loop", "inkling2_loop_text"),
    "inkling2": _wrapper("Inkling2", "inkling2_text"),
    "qwen3_5_moe_vl": _wrapper("Qwen3_5Moe", "qwen3_5_moe"),
    "qwen3_omni_moe_thinker": _wrapper("Qwen3OmniMoeThinker", "qwen3_omni_moe_text"),
    "qwen3_vl_moe": _wrapper("Qwen3VLMoe", "qwen3_vl_moe_text"),
    "qwen4_exp": _wrapper("Qwen4Exp", "qwen4_exp_text"),
    "step3p7": _wrapper("Step3p7", "step3p7_text"),
}

FAMILIES = TEXT | WRAPPERS
