"""Notice that a compiled model got other parameters, modules or hooks, without looking at all of it in every step.

Hooks on modules are traced into graphs, and Dynamo does not notice those that are registered later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hecate.private import HOOKS_OF_MODULES, INPUT_GRADIENT_HOOKS, flags_of_hooks, hooks_of_all_modules

_KEY = "_hecate_changes"
_hooks: list[Any] = []


@dataclass
class Changes:
    """A count of registrations, shared by all modules of one compiled model. A reader remembers the last it saw."""

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


@dataclass(frozen=True)
class PlacedHook:
    """A hook and where it is: equal to itself when it was taken off and comes back there."""

    place: str  # "forward_hooks on blocks.0.router"
    name: str
    flags: tuple[bool, ...]  # one for each way in which a hook may be called
    # Of the function, and of the object whose method it is; no other hook has it as long as it lives.
    identity: tuple[int, ...]
    alive: Callable[[], Any] = field(compare=False)  # the function, or None when nobody has it any more

    @classmethod
    def at(cls, place: str, hook: Any, flags: tuple[bool, ...]) -> PlacedHook:
        # Python makes a bound method anew each time it is asked for.
        of = (hook.__self__, hook.__func__) if isinstance(hook, MethodType) else (hook,)
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        return cls(place, name, flags, tuple(map(id, of)), _reference(hook))

    def __str__(self) -> str:
        # Without the numbers, which differ between ranks.
        return f"{self.place}: {self.name}"


def _reference(hook: Any) -> Callable[[], Any]:
    try:
        return weakref.WeakMethod(hook) if isinstance(hook, MethodType) else weakref.ref(hook)
    except TypeError:
        # The hook has no place for weak references.
        return lambda: hook


def _require_gradients_outside(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Let an output require gradients where nothing is traced: Dynamo breaks there, and its checkpoints need none."""
    if not torch.compiler.is_compiling():
        output.requires_grad_(True)


def _make_traceable(hooks: MutableMapping[int, Any]) -> None:
    for number, hook in hooks.items():
        if getattr(hook, "__name__", "") in INPUT_GRADIENT_HOOKS:
            hooks[number] = _require_gradients_outside


# In the order in which they are called.
Hooks = tuple[PlacedHook, ...]


class ModuleHooks:
    """The hooks on modules inside a model, and on all modules. Hooks on the model itself are called around graphs."""

    def __init__(self, changes: Changes) -> None:
        self._changes, self._seen = changes, -1
        # A place, the hooks there by the numbers of their handles, and the numbers of those that have a flag.
        self._places: list[tuple[str, MutableMapping[int, Any], Sequence[Mapping[int, bool]]]] = []
        self._dictionaries: list[Mapping[int, Any]] = []
        self._numbers: list[int] = []
        self._hooks: Hooks = ()

    def now(self, model: nn.Module) -> Hooks:
        """Return all hooks that are registered now, and look at nothing else."""
        if self._changes.number != self._seen:
            self._find(model)
        numbers = list(chain.from_iterable(filter(None, self._dictionaries)))
        # Torch gives no number twice.
        if numbers != self._numbers:
            self._numbers = numbers
            for _, hooks, _ in self._places:
                _make_traceable(hooks)
            self._hooks = tuple(
                PlacedHook.at(place, hook, tuple(number in those for those in flags))
                for place, hooks, flags in self._places
                for number, hook in hooks.items()
                # In graphs it does nothing, so with it there are no others.
                if hook is not _require_gradients_outside
            )
        return self._hooks

    def _find(self, model: nn.Module) -> None:
        self._seen, self._numbers = self._changes.number, []
        self._hooks = ()
        self._places = [
            (f"{kind[1:-1]} on all modules", hooks_of_all_modules(kind), flags_of_hooks(None, kind))
            for kind in HOOKS_OF_MODULES
        ]
        for name, module in model.named_modules():
            if module is not model:
                self._places += [
                    (f"{kind[1:-1]} on {name}", module.__dict__[kind], flags_of_hooks(module, kind))
                    for kind in HOOKS_OF_MODULES
                ]
        self._dictionaries = [hooks for _, hooks, _ in self._places]
