"""The sites of a model's parameters, and their replacement there."""

from __future__ import annotations

from torch import nn

from hecate.private import parameters_of
from hecate.wrap.carry_over import carry_over


class ParameterSites:
    """The sites of a model's parameters: ``(module, key)``, several for a tied one."""

    def __init__(self, model: nn.Module) -> None:
        # Keyed by id, so that a parameter's memory is free as soon as it is replaced.
        self._of: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, parameter in parameters_of(module).items():
                if parameter is not None:
                    self._of.setdefault(id(parameter), []).append((module, key))

    def of(self, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
        """Return all sites of a parameter, in the order of modules."""
        return self._of[id(parameter)]

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Put ``new`` at all sites of ``old``, with the attributes and hooks of ``old``."""
        carry_over(old, new)
        self._of[id(new)] = self._of.pop(id(old))
        for module, key in self.of(new):
            parameters_of(module)[key] = new
