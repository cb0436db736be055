"""The parts of ``hecate.S2Cache`` that derive from transformers' classes. Imported when the first cache is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from hecate.runtime.attention.options import S2Attention, UnsupportedAttentionError
from hecate.runtime.attention.pattern import Pattern


class S2Layer(CacheLayerMixin):
    """The keys and values ``[batch, key heads, tokens kept, size]`` of a sparse layer, kept by ``hecate::s2_store``.

    ``update`` is traced: by that operator the pass ``shard_context`` knows that a call of attention lacks keys.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, pattern: Pattern, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.numbers = tuple(pattern.numbers)
        self.cumulative_length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep new keys and values, and return those that attention needs: all, for a prompt."""
        store = torch.ops.hecate.s2_store
        if key_states.shape[1] != self.heads or value_states.shape[1] != self.heads:
            raise UnsupportedAttentionError(
                "hecate.S2Cache: a layer caches other heads than the model's config says. Use the default cache"
            )
        _refuse_eager()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = store(None, key_states, 0, self.numbers)
            self.values = store(None, value_states, 0, self.numbers)
            self.cumulative_length = key_states.shape[-2]
            return key_states, value_states
        self.keys = store(self.keys, key_states, self.cumulative_length, self.numbers)
        self.values = store(self.values, value_states, self.cumulative_length, self.numbers)
        self.cumulative_length = self.cumulative_length + 1
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (1 if self.is_initialized else query_length), 0

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove == 0:
            return
        raise UnsupportedAttentionError(
            "hecate.S2Cache: tokens are to be taken back, as assisted decoding does, but what they pushed out is "
            "gone. Use the default cache"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (x.repeat_interleave(repeats, dim=0) for x in (self.keys, self.values))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[indices, ...], self.values[indices, ...]


class SparseCache(Cache):
    """A cache of sparse layers, and of dense ones without change."""

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return one column for a single new token, in layers that show it all that they keep."""
        layer = self.layers[layer_idx]
        # Their mask is shared, and sparse ones have fewer keys: one column will do, the one in which padding shows.
        if query_length == 1 and type(layer) in (S2Layer, DynamicLayer) and layer.is_initialized:
            return 1, 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes


def _refuse_eager() -> None:
    if not torch.compiler.is_compiling():
        raise UnsupportedAttentionError(
            "hecate.S2Cache: only the forward of the compiled model knows which keys are kept. Call the object that "
            "hecate.compile returned"
        )


def make_cache(config: Any, options: S2Attention, pattern: Pattern, heads: int) -> SparseCache:
    """Make a cache of the layers that transformers has for a model, the sparse ones replaced."""
    layers = [
        S2Layer(pattern, heads) if type(layer) is DynamicLayer and not options.is_dense(number) else layer
        for number, layer in enumerate(DynamicCache(config=config).layers)
    ]
    return SparseCache(layers=layers)
