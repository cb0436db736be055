"""Where the parameters of a model hang, and others in their place."""

from __future__ import annotations

from torch import nn

from hecate.private import parameters_of
from hecate.wrap.carry_over import carry_over


class ParameterSites:
    """Where the parameters of a model hang: ``(module, key)``, several for a tied one."""

    def __init__(self, model: nn.Module) -> None:
        # By id, so that a parameter's memory is free as soon as it is replaced.
        self._of: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, parameter in parameters_of(module).items():
                if parameter is not None:
                    self._of.setdefault(id(parameter), []).append((module, key))

    def of(self, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
        """All sites of a parameter, the first one first."""
        return self._of[id(parameter)]

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Hang ``new`` wherever ``old`` is, with what hangs on that."""
        carry_over(old, new)
        self._of[id(new)] = self._of.pop(id(old))
        for module, key in self.of(new):
            parameters_of(module)[key] = new
