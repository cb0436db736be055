"""Change who owns which expert between two steps: parameters and gradients move (paper, Algorithm 2).

They move at the start of a training forward, when no graph of the step before is needed any more. Optimizer state
follows before its optimizer's next step; see ``optimizer_state``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hecate.private import parameters_of, tree_leaves
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import agree, gather_json
from hecate.runtime.comm.mesh import Mesh
from hecate.runtime.comm.warn import warn_alone, warn_together
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.policy import LayerView
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.step_mode import StepMode
from hecate.training.optimizer_state import state_that_cannot_move
from hecate.wrap.expert_shards import is_expert_shard
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.shard import refill, shard_of, worlds_of_gradients
from hecate.wrap.stack_experts import stack_of


class OwnerMover:
    """Re-shards one model every ``Policy.reshard_every`` optimizer steps, if its policy finds better owners.

    ``moves`` lists how many experts changed hands in each re-sharding so far.
    """

    def __init__(self, experts: Sequence[ExpertsModule], layers: Sequence[Layer], placer: Placer, mesh: Mesh) -> None:
        self.layers, self.placer, self.mesh = tuple(dict.fromkeys(layers)), placer, mesh
        self._experts: dict[int, list[ExpertsModule]] = {layer.id: [] for layer in layers}
        for e, layer in zip(experts, layers, strict=True):
            self._experts[layer.id].append(e)
        self.moves: list[int] = []
        self._steps = 0
        self._impossible = self._moved = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decides when it moves again, for checkpoints."""
        return {"steps": self._steps, "moves": list(self.moves)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self.moves = state["steps"], list(state["moves"])

    def before_forward(self, mode: StepMode) -> None:
        """Re-shard if it is time. A collective then; all ranks have made the same optimizer steps."""
        every = self.placer.policy.reshard_every
        if self.mesh.group.size == 1 or not every or not mode.training or not self.placer.optimizer_stepped:
            return
        # All steps of all optimizers between two forwards count as one.
        self.placer.optimizer_stepped = False
        self._steps += 1
        if self._steps % every or self._impossible:
            return
        exchanging = [layer for layer in self.layers if layer.placer.plan.loads]
        if not exchanging:
            return
        new = list(self.placer.policy.choose_owners(self._views(exchanging)) or ())
        if len(new) != len(exchanging):
            name = type(self.placer.policy).__name__
            raise RuntimeError(
                f"hecate: {name}.choose_owners returned owners of {len(new)} layers, not {len(exchanging)}"
            )
        for layer in exchanging:
            layer.placer.plan.forget()
        twins = self.mesh.twins
        if twins.group is not None:
            # A policy knows its own group's placements, so groups might choose different owners.
            first = gather_json([owners.ranks for owners in new], twins)[0]
            new = [Owners(tuple(ranks), layer.world.size) for ranks, layer in zip(first, exchanging, strict=True)]
        self.move(list(zip(exchanging, new, strict=True)))

    def _views(self, layers: Sequence[Layer]) -> list[LayerView]:
        """Return the layers with mean loads of all groups; a collective of groups."""
        views, twins = [layer.placer.view for layer in layers], self.mesh.twins
        if twins.group is None:
            return views
        twins.queue.drain()
        means = []
        for view in views:
            loads = torch.tensor(np.stack([view.long_load, *view.loads]), device="cpu").to(twins.control_device)
            collectives.all_reduce(loads, twins)
            long_load, *recent = (loads // twins.size).cpu().numpy()
            means.append(replace(view, long_load=long_load, loads=tuple(recent)))
        return means

    def move(self, wanted: Sequence[tuple[Layer, Owners]]) -> bool:
        """Bring experts to new owners, and return whether anything moved; a collective, which ranks must agree on."""
        changes = [(layer, owners) for layer, owners in wanted if owners != layer.owners]
        # Ranks agree before anything else: one that wants no change must hear of those that do.
        self._agree_on(changes)
        if not changes or not self._can_move(changes):
            return False
        if not self._moved:
            self._moved = True
            self._warn_of_copies([layer for layer, _ in changes])
        afterwards = [finish for layer, owners in changes for finish in self._move(layer, owners)]
        self.moves.append(sum(_changed(layer.owners, owners) for layer, owners in changes))
        for layer, owners in changes:
            layer.placer.change_owners(owners)
        for finish in afterwards:
            finish()
        return True

    def _agree_on(self, changes: Sequence[tuple[Layer, Owners]]) -> None:
        agree(
            [f"{layer.name}: {owners}" for layer, owners in changes]
            + [
                # Of experts in a list each has one or none, as they say when they move.
                f"{name} {p.dtype} gradient {p.grad is not None}"
                for layer, _ in changes
                for name, p in self._parameters(layer).items()
            ],
            "what moves when experts change owners",
            "Every rank must run the same steps, and a policy must choose the same owners on all of them. With "
            "reshard_every=0 owners stay as they are.",
            self.mesh.everyone,
        )

    def _can_move(self, changes: Sequence[tuple[Layer, Owners]]) -> bool:
        for layer, owners in changes:
            if owners.num_experts != layer.num_experts or owners.world_size != layer.world.size:
                name = type(self.placer.policy).__name__
                raise ValueError(
                    f"hecate: {name}.choose_owners returned owners for {layer.name} that do not fit: {owners}"
                )
        stuck = state_that_cannot_move({layer.id for layer, _ in changes})
        count = torch.tensor([len(stuck)], device=self.mesh.everyone.control_device)
        collectives.all_reduce(count, self.mesh.everyone)
        if int(count):
            self._impossible = True
            warn_together(
                f"hecate: experts stay with their owners, because {', '.join(stuck[:3]) or 'state elsewhere'} "
                "has no line for each expert and cannot move with them. Adam, AdamW and SGD can.",
                self.mesh.everyone.rank,
                stacklevel=2,
            )
            return False
        return True

    def _warn_of_copies(self, layers: Sequence[Layer]) -> None:
        """Warn once of tensors that may be averages of weights, which nobody moves."""
        if self.mesh.everyone.rank:
            return
        # A copy of one expert in a list no longer has its parameter's shape, and torch says so.
        stacks = {id(p) for own in self._experts.values() for e in own if (s := stack_of(e)) for p in s.parameters()}
        named = [one for layer in layers for one in self._parameters(layer).items()]
        shapes = {p.shape: name for name, p in named if p.numel() and id(p) not in stacks}
        copies = _tensors_elsewhere(shapes)
        if copies:
            warn_alone(
                f"hecate: experts change owners for the first time, and {len(copies)} tensors that are no parameter, "
                f"gradient or optimizer state are like this rank's experts, as of {shapes[copies[0].shape]}. If they "
                "are averages (EMA) or other copies of weights, they stay behind and are of other experts than the "
                "parameters from now on. Keep averages in optimizer.state[parameter], where they follow their "
                "experts, or set hecate.Config(reshard_every=0).",
                stacklevel=2,
            )

    def _parameters(self, layer: Layer) -> dict[str, nn.Parameter]:
        """Return the shards of a layer by their names, each once."""
        # Looked up anew: load_state_dict(assign=True) makes new parameters.
        found = (parameters_of(e.store)[key] for e in self._experts[layer.id] for key in e.parameters)
        return {shard.name: p for p in found if p is not None and (shard := shard_of(p)) is not None}

    def _move(self, layer: Layer, owners: Owners) -> Iterator[Callable[[], None]]:
        """Move a layer's parameters and gradients; yield what is to be done once the layer has its new owners."""
        stacks = [stack for e in self._experts[layer.id] if (stack := stack_of(e)) is not None]
        members = {id(parameters_of(stack)[key]): (stack, key) for stack in stacks for key in stack.sites}
        with torch.no_grad():
            for parameter in self._parameters(layer).values():
                stack, key = members.get(id(parameter), (None, ""))
                gradient, given = parameter.grad, list[bool]()
                if stack is not None:
                    given = self._have_gradients(stack.members(key))
                    gradient = stack.gradient(key) if any(given) else None
                    if any(given) and gradient is None:
                        gradient = torch.zeros_like(parameter, requires_grad=False)
                shard = shard_of(parameter)
                assert is_expert_shard(shard)
                if gradient is not None:
                    gradient = shard.moved(gradient, layer.owners, owners)
                values = shard.moved(parameter.detach(), layer.owners, owners)
                if stack is None:
                    refill(parameter, values, gradient)
                else:
                    refill(parameter, values, None)
                    yield partial(stack.refilled, key, gradient, given)

    def _have_gradients(self, members: Sequence[nn.Parameter]) -> list[bool]:
        """Return which experts have a gradient, on their owner; a collective."""
        world = self.mesh.everyone
        own = [p.grad is not None and p.numel() > 0 for p in members]
        has = torch.tensor(own, dtype=torch.int64, device=world.control_device)
        collectives.all_reduce(has, world)
        return [bool(number) for number in has.tolist()]


def _tensors_elsewhere(shapes: Collection[torch.Size]) -> list[torch.Tensor]:
    """Return living float tensors in one of ``shapes`` that are no shard, gradient or state of an optimizer."""
    # By type: isinstance would ask every proxy object in the process about its class.
    living = gc.get_objects()
    optimizers = [thing for thing in living if issubclass(type(thing), Optimizer)]
    known = worlds_of_gradients().keys() | {
        id(value)
        for optimizer in optimizers
        for state in getattr(optimizer, "state", {}).values()
        for value in tree_leaves(state)
    }
    return [
        thing
        for thing in living
        if type(thing) in (torch.Tensor, nn.Parameter)
        and thing.is_floating_point()
        and thing.shape in shapes
        and shard_of(thing) is None
        and id(thing) not in known
    ]


def _changed(old: Owners, new: Owners) -> int:
    return sum(a != b for a, b in zip(old.ranks, new.ranks, strict=True))
