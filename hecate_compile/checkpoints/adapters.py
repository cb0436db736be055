"""PEFT's adapters in a model: whether there are any, and which parameters are not theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hecate.checkpoints.state_dicts import sites_of


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into ``model``, which have other names, and files of their own."""
    return any("peft_config" in module.__dict__ for module in model.modules())


def check_no_adapters(model: nn.Module, function: str, way_out: str) -> None:
    """Raise ValueError for a model with PEFT's adapters."""
    if has_adapters(model):
        raise ValueError(f"{function}: the model has adapters of PEFT. {way_out}")


def frozen_base(model: nn.Module) -> set[str]:
    """Return all names in the plain model's state dict of parameters that are frozen and no adapter's."""
    adapters = {
        id(parameter)
        for module in model.modules()
        # Names that PEFT's layers give; an adapter that is not active is frozen, and an adapter all the same.
        for part in (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ()))
        for parameter in _parameters_at(module, part)
    }
    return {
        name
        for site in sites_of(model)
        if not site.parameter.requires_grad and id(site.parameter) not in adapters and "lora_" not in site.name
        for name in site.names
    }


def _parameters_at(module: nn.Module, path: str) -> Iterator[nn.Parameter]:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, nn.Module):
        yield from found.parameters()
    elif isinstance(found, nn.Parameter):
        yield found
