"""The operator that lets something outside of the model keep, or decide, which experts tokens go to.

| operator | shapes | backward |
|---|---|---|
| ``hold_choices`` | ``[T,k] -> [T,k]``, or ``[T] -> [T]`` | integers only |

``first``, ``count``, ``total``, ``differ`` and ``call`` are attributes of
:class:`hecate.runtime.state.layer.ChoicePart`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.runtime.ops.registration import define
from hecate.runtime.state.layer import ChoicePart, get_layer


def _hold_choices(ids: Tensor, *given: Any) -> Tensor:
    *part, layer = given
    choices = get_layer(layer).choices
    held = ids if choices is None else choices(ids, ChoicePart(*part))
    # Always a copy: a compiled graph writes over an operator's operands and results.
    return torch.empty_like(ids, memory_format=torch.contiguous_format).copy_(held)


define(
    "hold_choices(Tensor ids, int first, int count, int total, bool differ, int call, int layer) -> Tensor",
    _hold_choices,
    lambda ids, *given: torch.empty_like(ids, memory_format=torch.contiguous_format),
    # A layer that is computed again must choose the same, whatever is replayed by then.
    plans=True,
    results="chosen",
)
