"""Change who owns which expert between two steps: parameters, gradients and optimizer state move (paper, Alg. 2).

Parameters and gradients move at the start of the next training forward, when no graph of the step before is needed
any more. Optimizer state follows right before its optimizer's next step, whoever built that: each parameter group
notes whose experts its state belongs to, so state that was saved under other owners finds its way too.
"""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer
from hecate.wrap.expert_shards import Shard, shard_of
from hecate.wrap.find_experts import ExpertsModule

# The key in a parameter group under which the owners stand as JSON: text survives every kind of checkpoint.
_OWNERS = "hecate_owners"


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
        self._steps = 0
        self._impossible = False

    def before_forward(self) -> None:
        """Re-shard if it is time. A collective then; all ranks have made the same optimizer steps."""
        every = self.placer.policy.reshard_every
        if self.world.group is None or not every or not torch.is_grad_enabled() or not self.placer.stepped:
            return
        # However many optimizers the model has, what lies between two forwards is one step.
        self.placer.stepped = False
        self._steps += 1
        if self._steps % every or self._impossible:
            return
        exchanging = [layer for layer in self.layers if layer.plan.loads]
        if not exchanging:
            return
        new = self.placer.policy.own([self.placer.view(layer) for layer in exchanging])
        for layer in exchanging:
            layer.plan.forget()
        self.move(list(zip(exchanging, new, strict=True)))

    def move(self, wanted: Sequence[tuple[Layer, Owners]]) -> bool:
        """Bring experts to new owners; a collective. Optimizer state follows before its optimizer's next step.

        Returns:
            Whether anything moved.

        Raises:
            DisagreementError: ranks want different owners.
            ValueError: owners of another number of experts or ranks.
        """
        of = dict(zip((layer.id for layer in self.layers), self.experts, strict=True))
        changes = [(of[layer.id], layer, owners) for layer, owners in wanted if owners != layer.owners]
        if not changes or not self._agree_to_move(changes):
            return False
        for e, layer, owners in changes:
            self._move(e, layer, owners)
        self.moves.append(sum(_changed(layer.owners, owners) for _, layer, owners in changes))
        for _, layer, owners in changes:
            layer.owners = owners
            layer.plan.planned = None
        return True

    def _agree_to_move(self, changes: Sequence[tuple[ExpertsModule, Layer, Owners]]) -> bool:
        """Whether every rank can move its optimizer state; raises if ranks would move different things."""
        for _, layer, owners in changes:
            if owners.num_experts != layer.num_experts or owners.world_size != self.world.size:
                raise ValueError(f"hecate: the policy returned owners for {layer.name} that do not fit: {owners}")
        stuck = self._stuck_state({layer.id for _, layer, _ in changes})
        count = torch.tensor([len(stuck)], device=self.world.control_device)
        dist.all_reduce(count, group=self.world.group)
        if int(count):
            self._impossible = True
            if self.world.rank == 0:
                warnings.warn(
                    f"hecate: experts stay with their owners, because {', '.join(stuck[:3]) or 'state elsewhere'} "
                    "has no line for each expert and cannot move with them. Adam, AdamW and SGD can.",
                    stacklevel=2,
                )
            return False
        agree(
            [f"{layer.name}: {owners.ranks}" for _, layer, owners in changes]
            + [
                f"{layer.name}.{key} {p.dtype} gradient {p.grad is not None}"
                for e, layer, _ in changes
                for key, p in _parameters(e)
            ],
            "what moves when experts change owners",
            "Every rank must run the same steps. A policy with reshard_every=0 keeps owners as they are.",
            self.world,
        )
        return True

    def _stuck_state(self, layers: set[int]) -> list[str]:
        """State of living optimizers that does not have one line per expert."""
        # Garbage lives on until it is collected, which is at another time on every rank.
        gc.collect()
        return [
            f"{type(optimizer).__name__}'s {key!r}"
            for optimizer in list(_stepped)
            for group in optimizer.param_groups
            for parameter, shard in _shards_of([group])
            if shard.layer.id in layers
            for key, value in sorted(optimizer.state.get(parameter, {}).items())
            if not _can_move(value, parameter, _noted(group, shard.layer))
        ]

    def _move(self, experts: ExpertsModule, layer: Layer, owners: Owners) -> None:
        with torch.no_grad():
            for _, parameter in _parameters(experts):
                gradient = parameter.grad
                if gradient is not None:
                    gradient = collectives.move_shards(gradient, layer.owners, owners, self.world)
                values = collectives.move_shards(parameter.detach(), layer.owners, owners, self.world)
                _refill(parameter, values, gradient)


def _parameters(experts: ExpertsModule) -> Iterator[tuple[str, nn.Parameter]]:
    for key in experts.parameters:
        parameter = experts.module._parameters[key]
        if parameter is not None:
            yield key, parameter


def _changed(old: Owners, new: Owners) -> int:
    """How many experts change hands."""
    return sum(a != b for a, b in zip(old.ranks, new.ranks, strict=True))


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


# --- optimizers ---

_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _shards_of(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[nn.Parameter, Shard]]:
    for group in groups:
        for parameter in group["params"]:
            shard = shard_of(parameter)
            if shard is not None and shard.layer.world.group is not None:
                yield parameter, shard


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """State moves to where its experts went since the last step, or since it was saved."""
    # An optimizer step that is compiled itself counts no steps, so its experts stay where they are.
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        if _OWNERS in group:
            _follow(optimizer, group)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        layers = {shard.layer.id: shard.layer for _, shard in _shards_of([group])}
        for layer in layers.values():
            layer.placer.stepped = True
        if any(layer.placer.policy.reshard_every for layer in layers.values()):
            _stepped.add(optimizer)
            if _OWNERS not in group:
                group[_OWNERS] = _as_text(layers.values())


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


def _as_text(layers: Any) -> str:
    return json.dumps({layer.name: layer.owners.ranks for layer in layers})


def _follow(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """A collective if owners changed; the note in the group is the same on all ranks."""
    shards = list(_shards_of([group]))
    layers = {shard.layer.id: shard.layer for _, shard in shards}
    text = _as_text(layers.values())
    if text == group[_OWNERS]:
        return
    with torch.no_grad():
        for parameter, shard in shards:
            layer, state = shard.layer, optimizer.state.get(parameter, {})
            old = _noted(group, layer)
            if old == layer.owners:
                continue
            for key, value in sorted(state.items()):
                if not _can_move(value, parameter, old):
                    raise ValueError(
                        f"hecate: {type(optimizer).__name__}'s {key!r} of {shard.name} was made or saved under other "
                        "owners of the experts, and cannot follow them: it has no line for each expert"
                    )
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[key] = collectives.move_shards(value, old, layer.owners, layer.world)
    group[_OWNERS] = text


def _noted(group: dict[str, Any], layer: Layer) -> Owners:
    """Whose experts the group's state belongs to."""
    noted = json.loads(group[_OWNERS]) if _OWNERS in group else {}
    owners = Owners(tuple(noted.get(layer.name, layer.owners.ranks)), layer.world.size)
    if owners.num_experts != layer.num_experts:
        raise ValueError(
            f"hecate: optimizer state of {layer.name} was saved for {owners.num_experts} experts, "
            f"the model has {layer.num_experts}"
        )
    return owners


def _can_move(value: Any, parameter: nn.Parameter, owners: Owners) -> bool:
    """A number, or a tensor with a line for each expert that this rank had under ``owners``."""
    if isinstance(value, torch.Tensor):
        shard = shard_of(parameter)
        mine = owners.counts[shard.layer.world.rank] if shard is not None else len(parameter)
        return value.ndim == 0 or (value.ndim == parameter.ndim and len(value) == mine)
    return value is None or isinstance(value, (int, float, str))
