"""Notice that a compiled model got other parameters or modules, without looking at it in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_KEY = "_hecate_changes"
_hooks: list[Any] = []


@dataclass
class Changes:
    """A count of registrations, shared by all modules of one compiled model.

    Attributes:
        number: how many parameters and modules have been registered. A reader remembers the number it saw last.
    """

    number: int = 0

    def follow(self, model: nn.Module) -> None:
        """Count everything that is registered in ``model`` from now on. The first call installs torch's hooks."""
        if not _hooks:
            _hooks.append(register_module_module_registration_hook(_registered))
            _hooks.append(register_module_parameter_registration_hook(_registered))
        for module in model.modules():
            module.__dict__[_KEY] = self


def note_change(module: nn.Module) -> None:
    """Count a registration in ``module``."""
    changes = module.__dict__.get(_KEY)
    if changes is not None:
        changes.number += 1


def _registered(module: nn.Module, name: str, value: object) -> None:
    note_change(module)
