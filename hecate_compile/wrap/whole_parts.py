"""What a layer that runs as Python gathers, and what autograd saves of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from hecate.private import (
    parameters_of,
)
from hecate.runtime.ops.dense import DenseShard
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.shard import shard_of
from hecate.wrap.stack_experts import ExpertStack, stack_of


@dataclass(eq=False)
class Whole:
    """A parameter that is gathered, and what was read of it: numbers of experts, -1 for the parameter as one."""

    shard: torch.Tensor
    num_experts: int  # 0 of a dense parameter
    key: str
    version: int = 0  # of what was gathered
    # Weak, as what is saved for the backward holds this, and modules may hold their own results.
    stack: weakref.ref[ExpertStack] | None = None
    read: set[int] = field(default_factory=set)


class Part(NamedTuple):
    """What autograd saves instead of a view of a gathered tensor."""

    shard: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Kept(NamedTuple):
    """A tensor that autograd saves, which nobody may change before it is used."""

    tensor: torch.Tensor
    version: int


def parts_of(layer: nn.Module, experts: Sequence[ExpertsModule]) -> Iterator[Whole]:
    """Yield what a layer may read and this rank has only a part of."""
    for each in experts:
        own, stack = parameters_of(each.store), stack_of(each)
        for key in each.parameters:
            shard = own[key]
            assert shard is not None
            yield Whole(shard, each.num_experts, key, stack=weakref.ref(stack) if stack is not None else None)
    for module in layer.modules():
        for key, parameter in parameters_of(module).items():
            if parameter is not None and isinstance(shard_of(parameter), DenseShard):
                yield Whole(parameter, 0, key)
