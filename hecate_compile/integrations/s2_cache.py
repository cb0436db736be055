"""A cache for transformers' ``generate`` that keeps the tokens which S2-Attention looks at again."""

from __future__ import annotations

from typing import Any

from torch import nn

from hecate.compiled_model import compiled_model_of
from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.wrap.attention_config import config_value


def S2Cache(model: nn.Module) -> Any:
    """Make a cache for ``model.generate(past_key_values=hecate.S2Cache(model))``.

    For every sparse layer and each head of keys it keeps the local blocks and every ``stride``-th block before: at
    most ``(local + n / stride + 1) * block`` tokens of n blocks. Dense layers keep all. Generated tokens are those
    that come without the cache; it takes one prompt, then one token at a time, of batches and beams too.

    Args:
        model: a transformers model, compiled with ``hecate.Config(attention=...)``.

    Returns:
        A ``transformers.Cache``; ``layers[n].keys`` is ``[batch, key heads, tokens kept, size]``. One for each call
        of ``generate``.

    Raises:
        ValueError: the model was not compiled, or attention is dense, or heads with different patterns share keys
            (``per="q"``, or the compressed keys of DeepSeek), so that all are needed.

    While it is used, :class:`UnsupportedAttentionError` is raised for batches with padding, which would shift the
    blocks, for several tokens at once after the prompt, and for whatever takes tokens back, such as assisted
    decoding. After the prompt only the first column of a mask is looked at: one that hides some other token is not
    noticed.
    """
    options = compiled_model_of(model, "S2Cache").config.attention
    if options is None:
        raise ValueError("hecate.S2Cache: the model was compiled without Config(attention=...); it needs all keys")
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"hecate.S2Cache: {type(model).__name__} is no model of transformers")
    config = config.get_text_config(decoder=True)
    heads = config_value(config, "num_attention_heads")
    if not isinstance(heads, int):
        raise UnsupportedAttentionError(
            "hecate.S2Cache: the model's layers have different numbers of heads, or its config does not say how "
            "many. Use the default cache"
        )
    key_heads = config_value(config, "num_key_value_heads") or heads
    pattern = options.pattern(heads, key_heads)
    if key_heads % pattern.patterns:
        raise UnsupportedAttentionError(
            f'hecate.S2Cache: with per="q" {heads // key_heads} heads of queries look at the same keys with '
            'different patterns, so nearly all keys are needed. Use the default cache, or train with per="kv"'
        )
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedAttentionError(
            "hecate.S2Cache: the model's cache has one compressed key for all heads (MLA), and all heads together "
            "see every token. Use the default cache"
        )
    from hecate.integrations.s2_cache_layers import make_cache

    return make_cache(config, options, pattern, key_heads)
