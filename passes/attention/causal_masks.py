"""Tells whether the mask of an attention call is causal, by computing it (``mask_cone``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from hecate.passes.analysis.torch_values import value_of
from hecate.passes.attention.attention_calls import Scope, operands_of_attention
from hecate.passes.attention.mask_cone import MaskCone
from hecate.passes.attention.open_sizes import limits, same_size
from hecate.passes.base import Refused


class UnknownMask(Refused):
    """Raised for a mask that cannot be known before it runs: it depends on data, or on something that is not run."""


class CausalMasks:
    """Answers about masks that were looked at; one mask serves many layers."""

    def __init__(self) -> None:
        self._answers: dict[Node, MaskCone | Refused] = {}

    def refuse_others(self, node: Node, scope: Scope) -> None:
        """Raise Refused unless a call's mask in ``scope`` is causal; UnknownMask if only running it can tell."""
        given = operands_of_attention(node)
        mask = given["attn_mask"]
        home, source = scope.resolve(mask)
        if source not in self._answers:
            self._answers[source] = _answer(source, home)
        answer = self._answers[source]
        if isinstance(answer, Refused):
            raise type(answer)(str(answer))
        _refuse_other_shapes(value_of(given["query"]), value_of(given["key"]), value_of(mask))
        answer.refuse_changes(scope, mask, until=node)
        if given.get("is_causal"):
            raise Refused("the mask comes with is_causal")


def _answer(mask: Node, scope: Scope) -> MaskCone | Refused:
    """Return the cone of a causal mask, or why it is none."""
    try:
        cone = MaskCone(mask, scope)
    except Refused as refused:
        return UnknownMask(str(refused))
    try:
        _refuse_other_patterns(cone)
    except Refused as refused:
        return refused
    return cone


def _refuse_other_shapes(query: Any, key: Any, mask: torch.Tensor) -> None:
    """Raise unless there are as many queries as keys: query i of causal attention sees keys 0 to i."""
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        raise Refused("nothing is known about the shapes of queries and keys")
    lengths = (query.shape[-2], key.shape[-2], *mask.shape[-2:])
    if not all(same_size(lengths[0], length) for length in lengths):
        raise Refused(f"there are {query.shape[-2]} queries and {key.shape[-2]} keys")
    # A mask with more batches or heads than the queries would repeat them.
    extra = query.ndim - mask.ndim
    if extra < 0 or any(
        not same_size(size, 1) and not same_size(size, query.shape[extra + dim])
        for dim, size in enumerate(mask.shape[:-2])
    ):
        raise Refused(f"a mask of shape {tuple(mask.shape)} enlarges queries of shape {tuple(query.shape)}")


def _refuse_other_patterns(cone: MaskCone) -> None:
    """Raise unless the mask is causal at all sizes of its graph."""
    if value_of(cone.mask).dtype is not torch.bool:
        raise Refused("the mask is numbers that are added, not true and false")
    if not same_size(cone.queries, cone.keys):
        raise Refused(f"the mask is not square: {cone.queries} queries and {cone.keys} keys")
    if cone.is_fixed:
        _refuse_at(cone, int(cone.batch), int(cone.queries))
        return
    for batch, length in ((3, 5), (2, 9)):
        _refuse_at(cone, _within(cone.batch, batch), _within(cone.queries, length))
    # Far enough that a window, or an offset of some batch, would show.
    far = cone.reach()
    for batch, length in ((2, far), (far, 5), (far, far)):
        _refuse_at(cone, _within(cone.batch, batch), _within(cone.queries, length))


def _within(size: int | torch.SymInt, wanted: int) -> int:
    low, high = limits(size)
    return min(max(wanted, low), high)


def _refuse_at(cone: MaskCone, batch: int, length: int) -> None:
    keys = torch.arange(length, device="cpu")
    for first, rows in cone.rows(batch, length, length):
        queries = torch.arange(first, first + rows.shape[-2], device="cpu")
        if not bool((rows == (keys <= queries[:, None])).all()):
            raise Refused(f"the mask is not causal at a length of {length}: it has a window or another pattern")
