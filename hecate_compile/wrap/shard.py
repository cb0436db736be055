"""The record of every shard of a parameter, be it of experts or of dense rows.

A shard is a plain ``nn.Parameter`` under the old name, with a record attached; docs/decisions.md says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hecate.private import accumulation_hooks, gradient_hooks, mark_unbacked, set_hooks_of_tensor, swap_tensors
from hecate.runtime.comm import collectives
from hecate.runtime.comm.mesh import Mesh
from hecate.runtime.comm.world import World

# Advice where code changes what was gathered of a parameter in place, or a cast copy of it.
LOST_CHANGE = (
    "It changes a copy, which was gathered from all ranks or cast, so the change is lost. Change this rank's part of "
    "the parameter between forwards, by dict(model.named_parameters()), or keep it whole on every rank and in its "
    'dtype: Config(dense="replicate") for a dense one, Config(policy="replicate") for experts, no param_dtype.'
)
_SHARD = "_hecate_shard"
# Every shard parameter of this process, by identity: tensors compare element by element.
_alive: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Shard(Protocol):
    """The record of a shard parameter: the whole that it is a part of.

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
        """Return this rank's part of ``full``, with storage of its own."""
        ...

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter, from every rank's part. A collective."""
        ...


def shard_of(parameter: torch.Tensor | None) -> Shard | None:
    """Return the record of a shard parameter; None for every other tensor."""
    return getattr(parameter, _SHARD, None)


def no_longer_the_shard(name: str) -> RuntimeError:
    """Return the error to raise for a parameter that lost its record."""
    return RuntimeError(
        f"hecate: {name} is no longer the shard that hecate.compile made; something replaced the parameter. Load "
        "weights with load_state_dict."
    )


def cannot_be_copied(reason: str) -> TypeError:
    """Return the error to raise where a compiled model, or a part of it, is copied or pickled."""
    return TypeError(
        f"hecate: a compiled model cannot be copied or pickled ({reason}). Save model.state_dict(), which all "
        "ranks call together; for a second copy, build the model again. An average of the weights can be kept in "
        "optimizer.state[parameter], where it follows its experts."
    )


def shards_with_gradients() -> list[tuple[nn.Parameter, Shard]]:
    """Return the shards of living models that have a gradient, with their records."""
    return [(parameter, shard) for parameter, shard in _alive.items() if parameter.grad is not None]


def worlds_of_gradients() -> dict[int, World]:
    """Return the ranks that share each shard with a gradient, by the gradient's identity."""
    return {id(parameter.grad): shard.world for parameter, shard in shards_with_gradients()}


def note_shard(parameter: nn.Parameter, shard: Shard) -> None:
    """Give a parameter the record of what it is a part of."""
    setattr(parameter, _SHARD, shard)
    _alive[parameter] = shard


def as_parameter(local: torch.Tensor, shard: Shard, *, requires_grad: bool) -> nn.Parameter:
    parameter = nn.Parameter(local, requires_grad=requires_grad)
    note_shard(parameter, shard)
    if shard.length_varies and shard.world.size > 1:
        # This size changes when experts move, so graphs must not know it.
        mark_unbacked(parameter, 0)
    return parameter


def take_from_rank0(local: torch.Tensor, mesh: Mesh, scatter: Callable[[], None]) -> None:
    """Fill ``local``, this rank's part of a tensor, with rank 0's values; a collective.

    Args:
        scatter: fills it in the group that has rank 0. Each rank there tells its twins.
    """
    if mesh.group.group is not None and mesh.twins.rank == 0:
        scatter()
    if mesh.twins.group is not None:
        collectives.broadcast(local, mesh.twins)


def refill(parameter: nn.Parameter, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Give a parameter object other values, whose first dimension may have another length."""
    fresh = values.requires_grad_(parameter.requires_grad)
    hooks, after = gradient_hooks(parameter), accumulation_hooks(parameter)
    parameter.grad = None
    # ``parameter.data = values`` would not do: a loss of the last step that is still alive keeps the parameter's
    # gradient accumulator alive, which would go on expecting the old length. The swap leaves it with the old tensor.
    swap_tensors(parameter, fresh)
    # The handles by which users take them off stay good.
    set_hooks_of_tensor(parameter, hooks, after)
    parameter.grad = gradient
