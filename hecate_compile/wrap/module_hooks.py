"""Hooks on modules, which are traced into graphs: Dynamo does not look whether others have been put on since."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

from hecate.private import HOOKS_OF_MODULES, hooks_of_all_modules
from hecate.wrap.changes import Changes

# Names of the dictionaries in a module; those for all modules have a prefix.


class ModuleHooks:
    """The hooks on modules inside a model, and on all modules. Those of the model itself are called around graphs.

    Args:
        changes: told of what is registered in the model.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes, self._seen = changes, -1
        self._names: list[str] = []
        self._hooks: list[dict[int, Any]] = []

    def now(self, model: nn.Module) -> frozenset[int]:
        """The numbers of all hooks, of which torch gives each but once. Looks at each module, and at nothing else."""
        if self._changes.number != self._seen:
            self._find(model)
        return frozenset(chain.from_iterable(filter(None, self._hooks)))

    def describe(self, numbers: frozenset[int]) -> list[str]:
        """A line for each hook, without numbers, which are others on each rank."""
        return [
            f"{name}: {getattr(hook, '__qualname__', type(hook).__qualname__)}"
            for name, hooks in zip(self._names, self._hooks, strict=True)
            for number, hook in hooks.items()
            if number in numbers
        ]

    def _find(self, model: nn.Module) -> None:
        self._seen = self._changes.number
        found = [(f"{kind[1:-1]} on all modules", hooks_of_all_modules(kind)) for kind in HOOKS_OF_MODULES]
        for name, module in model.named_modules():
            if module is not model:
                found += [(f"{kind[1:-1]} on {name}", module.__dict__[kind]) for kind in HOOKS_OF_MODULES]
        self._names, self._hooks = [name for name, _ in found], [hooks for _, hooks in found]
