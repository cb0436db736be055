"""Options of S2-Attention, and how they become the pattern of a layer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hecate.runtime.attention.pattern import Pattern

Per = Literal["kv", "q"]

# Larger strides save little: the local blocks and the reading of queries remain.
_LARGEST_STRIDE = 16


class UnsupportedAttentionError(ValueError):
    """Raised where a layer's attention cannot have the pattern that ``Config(attention=...)`` asks for."""


@dataclass(frozen=True, kw_only=True)
class S2Attention:
    """Sparsely-sharded attention, for ``hecate.Config(attention=...)``: heads share the context among them.

    Every head sees the last ``local`` blocks of ``block`` tokens, and of the blocks before every ``stride``-th one;
    which ones is another choice for each head, so that all heads together see everything. The model's function
    changes: train it this way, or go on training.

    Source: S2-Attention, arXiv 2407.17678, and DKernel's ``get_sparse_attn_mask``.

    Attributes:
        block: tokens of a block, a power of two of at least 16.
        local: blocks, the own one included.
        stride: None for the number of heads with patterns of their own, at most 16: the largest stride at which they
            see the whole context together.
        dense_layers: layers that keep full attention, by their number in the model; or ``"every 2nd"``, which makes
            layers 1, 3, 5 and so on dense, as Phi-3-small has it. The paper keeps the first two.
        per: ``"kv"``: a pattern for each head of keys, so that a cache shrinks. ``"q"``: one for each head of
            queries; where several share a head of keys, more residues, and no smaller cache.
        offset: shifts the patterns. DKernel has 0, Phi-3-small 1; a model that was trained with one needs it.
        homogeneous: all heads have the same pattern. Most of the context is then seen by none.
        allow_holes: accept a stride at which parts of the context are seen by no head.

    Raises:
        ValueError: a wrong option.
        TypeError: ``dense_layers`` is neither several numbers nor a text.
    """

    block: int = 64
    local: int = 16
    stride: int | None = None
    dense_layers: tuple[int, ...] | str = (0, 1)
    per: Per = "kv"
    offset: int = 0
    homogeneous: bool = False
    allow_holes: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block", 16), ("local", 1), ("stride", 1), ("offset", 0)):
            value = getattr(self, name)
            if name == "stride" and value is None:
                continue
            if not _is_whole(value) or value < least:
                raise ValueError(f"hecate.S2Attention: {name}={value!r}, expected a whole number of at least {least}")
        if self.block & (self.block - 1):
            raise ValueError(f"hecate.S2Attention: block={self.block}, expected a power of two")
        if self.per not in get_args(Per):
            raise ValueError(f"hecate.S2Attention: per={self.per!r}, expected one of {get_args(Per)}")
        for name in ("homogeneous", "allow_holes"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"hecate.S2Attention: {name}={getattr(self, name)!r}, expected True or False")
        if self.homogeneous and self.stride is None:
            raise ValueError("hecate.S2Attention: homogeneous=True has one pattern, so give its stride")
        if not isinstance(self.dense_layers, (str, tuple, list, set, frozenset, range)):
            raise TypeError(
                f"hecate.S2Attention: dense_layers={self.dense_layers!r}, expected numbers of layers, such as (0, 1) "
                'or (), or a text like "every 2nd"'
            )
        if not isinstance(self.dense_layers, str):
            object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
            wrong = [number for number in self.dense_layers if not _is_whole(number) or number < 0]
            if wrong:
                raise ValueError(
                    f"hecate.S2Attention: dense_layers has {wrong[0]!r}, expected numbers of layers, from 0"
                )
        elif self._every is None:
            raise ValueError(
                f"hecate.S2Attention: dense_layers={self.dense_layers!r}, expected numbers of layers or a text like "
                '"every 2nd"'
            )

    @property
    def numbers_layers(self) -> bool:
        """Tell whether it matters which layer is which."""
        return bool(self.dense_layers)

    @property
    def _every(self) -> int | None:
        found = re.fullmatch(r"every (\d+)(?:st|nd|rd|th)", str(self.dense_layers))
        return int(found[1]) if found and int(found[1]) > 0 else None

    def is_dense(self, layer: int) -> bool:
        """Tell whether the layer with this number, from 0, keeps full attention."""
        if isinstance(self.dense_layers, str):
            assert self._every is not None
            return (layer + 1) % self._every == 0
        return layer in self.dense_layers

    def sparse_layers(self, layers: int) -> list[int]:
        """Return which of ``layers`` layers do not keep full attention."""
        return [number for number in range(layers) if not self.is_dense(number)]

    def described(self, query_heads: int | None, key_heads: int | None, layers: int | None) -> dict[str, Any]:
        """Return as plain data the options that decide a model's function, the same however they were written."""
        dense: Any = self.dense_layers if isinstance(self.dense_layers, str) else sorted(set(self.dense_layers))
        stride, offset, per = self.stride, self.offset, self.per
        if layers is not None:
            dense = sorted(set(range(layers)) - set(self.sparse_layers(layers)))
        if query_heads is not None and key_heads is not None:
            stride = self.pattern(query_heads, key_heads).stride
            offset %= stride
            per = "kv" if self.homogeneous or query_heads == key_heads else per
        return {
            "block": self.block,
            "local": self.local,
            "stride": stride,
            "dense_layers": dense,
            "per": per,
            "offset": offset,
            "homogeneous": self.homogeneous,
        }

    def pattern(self, query_heads: int, key_heads: int) -> Pattern:
        """Return the pattern of a layer with so many heads.

        Raises:
            ValueError: parts of the context are seen by no head, and that was not allowed; or every head would see
                all of it, and that was not asked for.
        """
        patterns = 1 if self.homogeneous else key_heads if self.per == "kv" else query_heads
        stride = self.stride if self.stride is not None else min(patterns, _LARGEST_STRIDE)
        if self.stride is None and stride == 1:
            raise ValueError(
                "hecate.S2Attention: with one head of keys there is one pattern, so no block can be left out. "
                'per="q" gives every head of queries a pattern of its own'
            )
        pattern = Pattern(self.block, self.local, stride, self.offset, patterns)
        if pattern.coverage < 1 and not self.allow_holes:
            one = "pattern" if patterns == 1 else "patterns"
            raise ValueError(
                f"hecate.S2Attention: with stride={stride} and {patterns} {one} all heads together see only "
                f"{pattern.coverage:.0%} of the context before the local blocks. The stride may be as large as the "
                f"number of heads with patterns of their own, here {patterns}; allow_holes=True accepts it"
            )
        return pattern


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
