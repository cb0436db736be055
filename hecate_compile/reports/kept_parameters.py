"""The part of a model's parameters that a rank keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hecate.wrap.shard import shard_of


@dataclass(frozen=True, kw_only=True)
class KeptParameters:
    """Parameters kept in one way ("experts", "dense, sharded", "dense, whole"): bytes whole, and on this rank."""

    kind: str
    count: int
    whole_bytes: int
    kept_bytes: int


def kept_parameters(model: nn.Module) -> tuple[KeptParameters, ...]:
    """Return the counts and bytes of each kind of parameters that the model has."""
    found: dict[str, list[nn.Parameter]] = {"experts": [], "dense, sharded": [], "dense, whole": []}
    for parameter in model.parameters():
        shard = shard_of(parameter)
        kind = "dense, whole" if shard is None else "experts" if shard.part == "experts" else "dense, sharded"
        found[kind].append(parameter)
    return tuple(_of_kind(kind, parameters) for kind, parameters in found.items() if parameters)


def _of_kind(kind: str, parameters: Iterable[nn.Parameter]) -> KeptParameters:
    count = whole = kept = 0
    for parameter in parameters:
        shard = shard_of(parameter)
        shape = parameter.shape if shard is None else shard.full_shape
        count += 1
        whole += shape.numel() * parameter.element_size()
        kept += parameter.numel() * parameter.element_size()
    return KeptParameters(kind=kind, count=count, whole_bytes=whole, kept_bytes=kept)
