"""The record of a compiled model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

from hecate.config import Config
from hecate.graph.backend import Backend
from hecate.runtime.comm.mesh import Mesh
from hecate.runtime.comm.world import World
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer
from hecate.training.forward import CompiledForward
from hecate.training.move_owners import OwnerMover
from hecate.wrap.find_experts import ExpertsModule, PassedOver

_KEY = "_hecate_compiled"


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledModel:
    """The parts of one compiled model, which holds them, so that they go when it goes.

    ``layers`` has the runtime record of each of ``experts``, which were sharded; those that share parameters have one
    in common. ``nodes`` says which of all ranks share a node. ``passed_over`` are modules that look similar and were
    not sharded. ``text_model`` is the name of the module that is traced alone, or "".
    """

    config: Config
    mesh: Mesh
    experts: tuple[ExpertsModule, ...]
    passed_over: tuple[PassedOver, ...]
    layers: tuple[Layer, ...]
    nodes: Topology
    sync: GradientSync
    backend: Backend
    placer: Placer
    owner_mover: OwnerMover
    forward: CompiledForward
    loops: tuple[str, ...]
    text_model: str

    @property
    def world(self) -> World:
        """The ranks that train the model."""
        return self.mesh.everyone

    @property
    def policy_without_placement(self) -> str | None:
        """The policy's name if it decides no placement (``"gather"`` or ``"replicate"``); None for all others."""
        name = self.config.policy
        return name if isinstance(name, str) and name in ("gather", "replicate") else None

    def attach(self, model: nn.Module) -> None:
        # The dictionary is written, as a model's own class may have replaced setattr. The reference tells a shallow
        # copy, which takes the entry along, from the model.
        model.__dict__[_KEY] = (weakref.ref(model), self)


def _find(module: nn.Module) -> CompiledModel | None:
    model, found = module.__dict__.get(_KEY, (None, None))
    return found if model is not None and model() is module else None


def is_compiled(module: nn.Module) -> bool:
    return _find(module) is not None


def compiled_model_of(model: nn.Module, function: str) -> CompiledModel:
    """Return the record of a compiled model; raise with the name of ``hecate``'s ``function`` if it has none."""
    found = _find(model) if isinstance(model, nn.Module) else None
    if found is None:
        raise ValueError(
            f"hecate.{function}: this {type(model).__name__} was not compiled with hecate.compile. "
            "Pass the object that hecate.compile returned, not a wrapper or a submodule of it."
        )
    return found
