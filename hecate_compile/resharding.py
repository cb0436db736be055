"""Change who owns which expert between two steps: parameters, gradients and optimizer state move (paper, Alg. 2).

Optimizers are found through torch's own step hook, whoever built them. The move happens at the start of the next
training forward, when no graph of the step before is needed any more.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hecate.finder import ExpertsModule
from hecate.runtime import transport
from hecate.runtime.agreement import agree
from hecate.runtime.layer import Layer
from hecate.runtime.owners import Owners
from hecate.runtime.placer import Placer
from hecate.runtime.world import World
from hecate.sharding import shard_of

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _steps[optimizer] = _steps.get(optimizer, 0) + 1


register_optimizer_step_post_hook(_count_step)


class Resharder:
    """Re-shards one model every ``Policy.reshard_every`` optimizer steps, if its policy finds better owners.

    Attributes:
        moves: how many experts changed hands in each re-sharding so far.
    """

    def __init__(
        self, experts: Sequence[ExpertsModule], layers: Sequence[Layer], placer: Placer, world: World
    ) -> None:
        self.experts, self.layers, self.placer, self.world = experts, layers, placer, world
        self.moves: list[int] = []
        self._done = 0
        self._impossible = False

    def before_forward(self) -> None:
        """Re-shard if it is time. A collective then; all ranks have made the same optimizer steps."""
        every = self.placer.policy.reshard_every
        if self.world.group is None or not every or self._impossible or not torch.is_grad_enabled():
            return
        optimizers = self._optimizers()
        steps = max((_steps[optimizer] for optimizer in optimizers), default=0)
        if steps // every <= self._done:
            return
        self._done = steps // every
        exchanging = [(e, layer) for e, layer in zip(self.experts, self.layers, strict=True) if layer.plan.loads]
        if not exchanging:
            return
        new = self.placer.policy.own([self.placer.view(layer) for _, layer in exchanging])
        self._move([(e, layer, owners) for (e, layer), owners in zip(exchanging, new, strict=True)], optimizers)
        for _, layer in exchanging:
            layer.plan.long_load = None

    def _optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped and hold experts of this model, in the order of their first step."""
        mine = {layer.id for layer in self.layers}
        return [
            optimizer
            for optimizer in list(_steps)
            if any(
                (shard := shard_of(p)) is not None and shard.layer.id in mine
                for group in optimizer.param_groups
                for p in group["params"]
            )
        ]

    def _move(self, wanted: Sequence[tuple[ExpertsModule, Layer, Owners]], optimizers: Sequence[Optimizer]) -> None:
        changes = [(e, layer, owners) for e, layer, owners in wanted if owners != layer.owners]
        if not changes:
            return
        for _, layer, owners in changes:
            if sum(owners.counts) != layer.num_experts or owners.world_size != self.world.size:
                raise ValueError(f"hecate: the policy returned owners for {layer.name} that do not fit: {owners}")
        moving = [
            _Moving(parameter, layer, owners, _states_of(parameter, optimizers))
            for e, layer, owners in changes
            for key in e.parameters
            if (parameter := e.module._parameters[key]) is not None
        ]
        if not self._all_can_move(moving, changes):
            return
        with torch.no_grad():
            for one in moving:
                one.move(self.world)
        self.moves.append(
            sum(a != b for _, layer, owners in changes for a, b in zip(layer.owners.ranks, owners.ranks, strict=True))
        )
        for _, layer, owners in changes:
            layer.owners = owners
            layer.plan.planned = None

    def _all_can_move(
        self, moving: Sequence[_Moving], changes: Sequence[tuple[ExpertsModule, Layer, Owners]]
    ) -> bool:
        """Whether every rank can move all its tensors; raises if ranks would move different things."""
        agree(
            [f"{layer.name}: {owners.ranks}" for _, layer, owners in changes]
            + [line for one in moving for line in one.describe()],
            "what moves when experts change owners",
            "Every rank must make the same optimizer steps with the same optimizers. "
            "Config(reshard_every=0) keeps owners as they are.",
            self.world,
        )
        stuck = [name for one in moving for name in one.stuck()]
        count = torch.tensor([len(stuck)], device=self.world.control_device)
        dist.all_reduce(count, group=self.world.group)
        if not int(count):
            return True
        self._impossible = True
        if self.world.rank == 0:
            warnings.warn(
                f"hecate: experts stay with their owners, because {', '.join(stuck[:3]) or 'state on another rank'} "
                "has no line for each expert and cannot move with them. AdamW, Adam and SGD can.",
                stacklevel=2,
            )
        return False


@dataclass(frozen=True)
class _State:
    """One tensor of an optimizer's state, where it is kept."""

    optimizer: str
    holder: dict[Any, Any]
    key: str

    @property
    def value(self) -> torch.Tensor:
        value: torch.Tensor = self.holder[self.key]
        return value


def _states_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> list[_State]:
    """The state of a parameter without numbers such as the step, in an order that is the same on all ranks."""
    return [
        _State(type(optimizer).__name__, optimizer.state[parameter], key)
        for optimizer in optimizers
        if parameter in optimizer.state
        for key, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, torch.Tensor) and value.ndim > 0
    ]


@dataclass(frozen=True)
class _Moving:
    """An expert parameter that gets other rows, and the tensors that have a line for each of its experts."""

    parameter: nn.Parameter
    layer: Layer
    owners: Owners
    states: list[_State]

    def describe(self) -> list[str]:
        shard = shard_of(self.parameter)
        name = shard.name if shard is not None else self.layer.name
        tensors = [(name, self.parameter.detach())]
        if self.parameter.grad is not None:
            tensors.append((f"gradient of {name}", self.parameter.grad))
        tensors += [(f"{state.optimizer} {state.key} of {name}", state.value) for state in self.states]
        return [f"{text} {value.dtype} {list(value.shape[1:])}" for text, value in tensors]

    def stuck(self) -> list[str]:
        """State that does not have one line per expert."""
        shape = self.parameter.shape
        return [
            f"{state.optimizer}'s {state.key!r}"
            for state in self.states
            if state.value.ndim != len(shape) or len(state.value) != shape[0]
        ]

    def move(self, world: World) -> None:
        """A collective. Parameter and state objects stay; what they hold is other experts'."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return transport.move_shards(tensor, self.layer.owners, self.owners, world)

        for state in self.states:
            state.holder[state.key] = moved(state.value)
        gradient = None if self.parameter.grad is None else moved(self.parameter.grad)
        _refill(self.parameter, moved(self.parameter.detach()), gradient)


def _refill(parameter: nn.Parameter, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Give a parameter object other values, whose first dimension may have another length."""
    fresh = values.requires_grad_(parameter.requires_grad)
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    parameter.grad = None
    # Not ``parameter.data = values``: a loss of the last step that is still alive keeps the parameter's gradient
    # accumulator alive, which would go on expecting the old length. The swap leaves that with the old tensor.
    torch._C._swap_tensor_impl(parameter, fresh)
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, after
    parameter.grad = gradient
