"""Carry over what users hang on a parameter when ``hecate.compile`` puts another one in its place.

Attributes are copied. Gradient hooks are given the gathered gradient of the whole parameter on every rank, and the
rank takes its part of the result. What cannot be carried over is refused before anything changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hecate.private import (
    DYNAMO_NOTES,
    INITIALIZED,
    accumulation_hooks,
    gradient_hooks,
    parameters_of,
    set_hooks_of_tensor,
)
from hecate.wrap.find_experts import STACK, ExpertsModule
from hecate.wrap.shard import Shard, shard_of

_Hook = Callable[[torch.Tensor], torch.Tensor | None]
_Hooks = dict[int, Any]
# Attributes by which Hecate and Dynamo mark a tensor, and transformers one that it has loaded: no user's.
_NOTES = ("_hecate_", DYNAMO_NOTES, INITIALIZED)


def carry_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give ``new`` the attributes and hooks of ``old``, in whose place it is; it may be a shard of it."""
    vars(new).update(_attributes(old))
    hooks, after = gradient_hooks(old), accumulation_hooks(old)
    shard = shard_of(new)
    if hooks and shard is not None:
        hooks = _one(_of_whole(hooks, shard))
    set_hooks_of_tensor(new, hooks, after)


def carry_over_stacked(parts: Sequence[nn.Parameter], stacked: nn.Parameter) -> None:
    """Give ``stacked`` the gradient hooks of the parameters that it is made of; they keep all else."""
    all_hooks = [gradient_hooks(part) for part in parts]
    if not any(all_hooks):
        return

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        given = zip(all_hooks, gradient.unbind(), strict=True)
        return torch.stack([call_hooks(hooks, part) if hooks else part for hooks, part in given])

    set_hooks_of_tensor(stacked, _one(hook), None)
    for part in parts:
        set_hooks_of_tensor(part, None, accumulation_hooks(part))


def describe_hooks(model: nn.Module, found: Sequence[ExpertsModule], *, dense: bool) -> list[str]:
    """Return lines that must be equal on all ranks: gradient hooks of what will be sharded, which gather."""
    return [
        f"parameter {name}: {len(hooks)} gradient hooks"
        for name, p in _replaced(model, found, dense=dense)
        if (hooks := gradient_hooks(p))
    ]


def check_carried(model: nn.Module, found: Sequence[ExpertsModule], *, dense: bool) -> None:
    """Raise ValueError for what hangs on parameters of experts, with ``dense`` of all, and cannot on shards."""
    for experts in found:
        _check_plain(experts)
    members = {id(p) for experts in found for member in experts.members for p in member.parameters()}
    for name, parameter in _replaced(model, found, dense=dense):
        # Experts in a list keep the parameters that they have.
        if id(parameter) not in members:
            _check_one(name, parameter)


def _check_plain(experts: ExpertsModule) -> None:
    for name, module in experts.module.named_modules(prefix=experts.name):
        if parametrize.is_parametrized(module):
            assert isinstance(module.parametrizations, nn.ModuleDict)
            key, each = next(iter(module.parametrizations.items()))
            by = next(each.children())
            raise ValueError(
                f"hecate.compile: {name}.{key} is parametrized by {type(by).__name__}, which computes it from others "
                "each time it is read, in code of torch that is not traced: there each rank has some experts alone. "
                "Take it off with torch.nn.utils.parametrize.remove_parametrizations, compute it in the experts' "
                'forward, or use hecate.Config(policy="replicate").'
            )


def _check_one(name: str, parameter: nn.Parameter) -> None:
    after = accumulation_hooks(parameter)
    if after:
        hook = next(iter(after.values()))
        raise ValueError(
            f"hecate.compile: {name} has the hook {_name_of(hook)} from register_post_accumulate_grad_hook, which is "
            "given the parameter itself, and each rank keeps a part of that in a parameter of its own. Register it "
            "after hecate.compile, on what model.named_parameters() has then: it is given this rank's part. Hooks of "
            "register_hook stay, and are given whole gradients."
        )
    for key, value in _attributes(parameter).items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
            raise ValueError(
                f"hecate.compile: {name} has the attribute {key!r}, a tensor of its own shape {list(value.shape)}, "
                "and each rank keeps a part of the parameter, which changes when experts move. Keep it in "
                "optimizer.state[parameter], where it follows its experts, or in a buffer of the model."
            )


def _replaced(model: nn.Module, found: Sequence[ExpertsModule], *, dense: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of which each rank will have a part, by name."""
    experts = {
        id(p)
        for one in found
        for p in (
            *(p for member in one.members for p in member.parameters()),
            *(parameters_of(one.module).get(key) for key in one.parameters),
        )
    }
    for name, parameter in model.named_parameters():
        # A dense parameter of one row is kept whole.
        if id(parameter) in experts or (dense and parameter.ndim and len(parameter) > 1):
            yield name, parameter


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    return {key: value for key, value in vars(parameter).items() if not key.startswith(_NOTES)}


def _one(hook: _Hook) -> _Hooks:
    # As ``register_hook`` would keep it, which refuses frozen parameters.
    hooks: _Hooks = OrderedDict()
    hooks[RemovableHandle(hooks).id] = hook
    return hooks


def _of_whole(hooks: _Hooks, shard: Shard) -> _Hook:
    # The user's own dictionary: what is removed from it by its handle is gone here, too.
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if not hooks:
            return gradient
        shard.world.queue.drain()
        with torch.no_grad():
            return shard.slice(call_hooks(hooks, shard.gather(gradient)))

    return hook


def call_hooks(hooks: _Hooks, gradient: torch.Tensor) -> torch.Tensor:
    """Return what a chain of hooks makes of a gradient."""
    for hook in list(hooks.values()):
        result = hook(gradient)
        if result is not None and result.shape != gradient.shape:
            raise RuntimeError(
                f"hecate: the hook {_name_of(hook)} returned a gradient of the shape {list(result.shape)}, "
                f"not {list(gradient.shape)}"
            )
        gradient = gradient if result is None else result
    return gradient


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__name__)


class ParameterSites:
    """The sites of a model's parameters: ``(module, key)`` in the order of modules, several for a tied one."""

    def __init__(self, model: nn.Module) -> None:
        # Keyed by id, so that a parameter's memory is free as soon as it is replaced.
        self._of: dict[int, list[tuple[nn.Module, str]]] = {}
        stacks = [module.__dict__[STACK] for module in model.modules() if STACK in module.__dict__]
        for module in (*model.modules(), *stacks):
            for key, parameter in parameters_of(module).items():
                if parameter is not None:
                    self._of.setdefault(id(parameter), []).append((module, key))

    def of(self, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
        return self._of[id(parameter)]

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Put ``new`` at all sites of ``old``, with the attributes and hooks of ``old``."""
        carry_over(old, new)
        self._of[id(new)] = self._of.pop(id(old))
        for module, key in self.of(new):
            parameters_of(module)[key] = new
