"""Change who owns which expert between two steps: parameters and gradients move (paper, Algorithm 2).

They move at the start of a training forward, when no graph of the step before is needed any more. Optimizer state
follows before its optimizer's next step; see ``optimizer_state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hecate.private import accumulation_hooks, gradient_hooks, parameters_of, set_hooks_of_tensor, swap_tensors
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.warn import warn_alone, warn_together
from hecate.runtime.comm.world import Mesh
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.step_mode import StepMode
from hecate.training.optimizer_state import state_that_cannot_move, tensors_elsewhere
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.shard import shard_of


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
        new = list(self.placer.policy.choose_owners([layer.placer.view for layer in exchanging]) or ())
        if len(new) != len(exchanging):
            name = type(self.placer.policy).__name__
            raise RuntimeError(
                f"hecate: {name}.choose_owners returned owners of {len(new)} layers, not {len(exchanging)}"
            )
        for layer in exchanging:
            layer.placer.plan.forget()
        self.move(list(zip(exchanging, new, strict=True)))

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
        for layer, owners in changes:
            self._move(layer, owners)
        self.moves.append(sum(_changed(layer.owners, owners) for layer, owners in changes))
        for layer, owners in changes:
            layer.placer.change_owners(owners)
        return True

    def _agree_on(self, changes: Sequence[tuple[Layer, Owners]]) -> None:
        agree(
            [f"{layer.name}: {owners}" for layer, owners in changes]
            + [
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
        shapes = {p.shape: name for layer in layers for name, p in self._parameters(layer).items() if p.numel()}
        copies = tensors_elsewhere(set(shapes))
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
        found = (parameters_of(e.module)[key] for e in self._experts[layer.id] for key in e.parameters)
        return {shard.name: p for p in found if p is not None and (shard := shard_of(p)) is not None}

    def _move(self, layer: Layer, owners: Owners) -> None:
        with torch.no_grad():
            for parameter in self._parameters(layer).values():
                gradient = parameter.grad
                if gradient is not None:
                    gradient = collectives.move_shards(gradient, layer.owners, owners, layer.world)
                values = collectives.move_shards(parameter.detach(), layer.owners, owners, layer.world)
                _refill(parameter, values, gradient)


def _changed(old: Owners, new: Owners) -> int:
    return sum(a != b for a, b in zip(old.ranks, new.ranks, strict=True))


def _refill(parameter: nn.Parameter, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
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
