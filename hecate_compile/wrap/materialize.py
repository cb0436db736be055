"""Give a model on the meta device storage, one module at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hecate.private import INIT_WEIGHTS, buffers_of, parameters_of, version_of
from hecate.runtime.comm.agreement import gather_texts
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.comm.world import World
from hecate.wrap.carry_over import ParameterSites


def has_meta(model: nn.Module) -> bool:
    """Return whether any parameter or buffer has no storage yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def make_module_real(
    model: nn.Module, name: str, world: World, sites: ParameterSites, skip: Sequence[str]
) -> list[str]:
    """Replace a module's own meta tensors, initialized on rank 0 alone; return the names of those left unwritten.

    Parameters in ``skip``, of which this rank keeps only a part, stay on the meta device.
    """
    module = model.get_submodule(name)
    fresh = _allocate(module, world.device, sites, skip)
    if not fresh or world.rank != 0:
        return []
    versions = {key: version_of(tensor) for key, tensor in fresh.items()}
    _initialize(model, name, module)
    return [f"{name}.{key}".lstrip(".") for key, tensor in fresh.items() if version_of(tensor) == versions[key]]


def _allocate(
    module: nn.Module, device: torch.device, sites: ParameterSites, skip: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Replace the module's own meta tensors by NaN-filled ones, and return these; tied parameters stay tied."""
    fresh: dict[str, torch.Tensor] = {}
    for key, parameter in list(parameters_of(module).items()):
        if parameter is None or not parameter.is_meta or key in skip or parameters_of(module)[key] is not parameter:
            continue
        fresh[key] = real = nn.Parameter(_unwritten(parameter, device), requires_grad=parameter.requires_grad)
        sites.replace(parameter, real)
    for key, buffer in buffers_of(module).items():
        if buffer is not None and buffer.is_meta:
            buffers_of(module)[key] = fresh[key] = _unwritten(buffer, device)
    return fresh


def _unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    real = torch.empty_like(like, device=device, requires_grad=False)
    return real.fill_(float("nan")) if real.is_floating_point() else real.zero_()


def _initialize(model: nn.Module, name: str, module: nn.Module) -> None:
    """Run the nearest enclosing ``_init_weights(module)``, or ``module.reset_parameters()``."""
    with torch.no_grad():
        path = name.split(".") if name else []
        for depth in range(len(path), -1, -1):
            outer: Any = model.get_submodule(".".join(path[:depth]))
            if hasattr(outer, INIT_WEIGHTS):
                getattr(outer, INIT_WEIGHTS)(module)
                break
        else:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()


def warn_uninitialized(names: Sequence[str], world: World) -> None:
    """Warn of tensors that came from the meta device and have no values yet, as rank 0 knows them. A collective."""
    if world.group is not None:
        names = json.loads(gather_texts(json.dumps(names).encode(), world)[0])
    if names:
        warn_together(
            f"hecate.compile: nothing initialized {', '.join(names[:8])}, which came from the meta device: "
            "no _init_weights or reset_parameters writes them. They are NaN, or 0 for integers, until you fill them: "
            "with load_state_dict, or, for buffers that are not in it, by computing them again.",
            world.rank,
            stacklevel=5,
        )
