"""The operator that lets something outside of the model keep, or decide, which experts tokens go to.

| operator | shapes | backward |
|---|---|---|
| ``hold_choices`` | ``[T,k] -> [T,k]``, or ``[T] -> [T]`` | integers only |

``first``, ``count`` and ``total``: of the ``total`` experts of a token the operand has ``count``, and ``first`` came
before them; if they ``differ`` no expert may come twice. See :class:`hecate.runtime.state.layer.HeldChoices`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.runtime.ops.registration import define
from hecate.runtime.state.layer import get_layer


def _hold_choices(ids: Tensor, first: int, count: int, total: int, differ: bool, layer: int) -> Tensor:
    choices = get_layer(layer).choices
    held = ids if choices is None else choices(ids, first, count, total, differ)
    return held.clone(memory_format=torch.contiguous_format) if held is ids else held


define(
    "hold_choices(Tensor ids, int first, int count, int total, bool differ, int layer) -> Tensor",
    _hold_choices,
    lambda ids, first, count, total, differ, layer: torch.empty_like(ids, memory_format=torch.contiguous_format),
    # A layer that is computed again must choose the same, whatever is replayed by then.
    plans=True,
    results="chosen",
)
