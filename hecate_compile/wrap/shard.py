"""What every shard of a parameter answers, be it of experts or of dense rows.

A shard is a plain ``nn.Parameter`` under the parameter's old name, with a record attached. Why a plain parameter: see
docs/decisions.md.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hecate.private import mark_unbacked
from hecate.runtime.comm.world import World

_SHARD = "_hecate_shard"
# Every shard parameter of this process, by identity: tensors compare element by element.
_alive: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Shard(Protocol):
    """What a shard parameter is a shard of.

    Attributes:
        name: qualified parameter name in the model; of a tied parameter, the first.
        full_shape: shape of the whole parameter.
        world: the ranks that share it.
        part: what this rank has of it, for messages: "experts" or "rows".
        length_varies: ranks keep parts of different lengths, which may change while the model trains.
    """

    @property
    def name(self) -> str: ...
    @property
    def full_shape(self) -> torch.Size: ...
    @property
    def world(self) -> World: ...
    @property
    def part(self) -> str: ...
    @property
    def length_varies(self) -> bool: ...

    def slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``full``, with storage of its own."""
        ...

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole from every rank's part. A collective."""
        ...


def shard_of(parameter: torch.Tensor | None) -> Shard | None:
    """The record of a shard parameter; None for every other tensor."""
    return getattr(parameter, _SHARD, None)


def shards_with_gradients() -> list[tuple[nn.Parameter, Shard]]:
    """All shards of living models that have a gradient."""
    return [(parameter, shard) for parameter, shard in _alive.items() if parameter.grad is not None]


def worlds_of_gradients() -> dict[int, World]:
    """The ranks that share each shard with a gradient, by the gradient's identity."""
    return {id(parameter.grad): shard.world for parameter, shard in shards_with_gradients()}


def as_parameter(local: torch.Tensor, shard: Shard, *, requires_grad: bool) -> nn.Parameter:
    """``local`` as a parameter that knows what it is a shard of."""
    parameter = nn.Parameter(local, requires_grad=requires_grad)
    setattr(parameter, _SHARD, shard)
    _alive[parameter] = shard
    if shard.length_varies and shard.world.size > 1:
        # A size that the graph must not know.
        mark_unbacked(parameter, 0)
    return parameter
