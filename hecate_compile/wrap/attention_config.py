"""A model's config: values that are equal for all its layers, and its attention, in the names of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hecate.private import ATTENTION_IMPLEMENTATION
from hecate.runtime.attention.options import S2Attention

# Kinds of layers that have one attention over their own tokens.
_WITH_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A model's attention; a field is None where the config does not say it, or layers differ."""

    # Of queries and of keys: both or none.
    heads: int | None = None
    key_heads: int | None = None
    layers: int | None = None
    all_attend: bool = False  # each layer has one attention
    implementation: str | None = None  # such as "sdpa"
    positions: int | None = None  # the longest sequence

    def count_sparse(self, wanted: S2Attention | None) -> int | None:
        """Count the layers that must become sparse; None where the config does not say it, or none shall."""
        if wanted is None or self.layers is None or not self.all_attend:
            return None
        return len(wanted.sparse_layers(self.layers))


def attention_config(model: nn.Module) -> AttentionConfig:
    """Read ``model.config``, that of the text where there are several."""
    found: Any = getattr(model, "config", None)
    found = found.get_text_config() if hasattr(found, "get_text_config") else found
    heads = config_value(found, "num_attention_heads")
    key_heads = config_value(found, "num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        return AttentionConfig()
    layers, positions = (config_value(found, name) for name in ("num_hidden_layers", "max_position_embeddings"))
    kinds = config_value(found, "layer_types") or ()
    return AttentionConfig(
        heads=heads,
        key_heads=key_heads,
        layers=layers if isinstance(layers, int) else None,
        all_attend=not getattr(found, "is_encoder_decoder", False) and set(kinds) <= set(_WITH_ATTENTION),
        implementation=getattr(found, ATTENTION_IMPLEMENTATION, None),
        positions=positions if isinstance(positions, int) else None,
    )


def config_value(config: object, name: str) -> Any:
    """Return ``config.name``; None where there is none, and where layers differ."""
    try:
        return getattr(config, name, None)
    # A config of transformers raises a RuntimeError where layers have numbers of their own (from 5.24), and
    # properties of other configs raise whatever they like.
    except Exception:
        return None
