"""Carry over what users hang on a parameter when ``hecate.compile`` puts another one in its place.

Attributes are copied. Gradient hooks are given the gathered gradient of the whole parameter on every rank, and the
rank takes its part of the result. What cannot be carried over is refused before anything changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hecate.private import (
    DYNAMO_NOTES,
    INITIALIZED,
    accumulation_hooks,
    children_of,
    gradient_hooks,
    parameters_of,
    set_hooks_of_tensor,
)
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.shard import Shard, shard_of

_Hook = Callable[[torch.Tensor], torch.Tensor | None]
_Hooks = dict[int, Any]
# Attributes by which Hecate and Dynamo mark a tensor, and transformers one that it has loaded: no user's.
_NOTES = ("_hecate_", DYNAMO_NOTES, INITIALIZED)
_HOW = (
    "Freeze all of them or none, or clear the gradients of some after the backward. "
    'hecate.Config(policy="replicate") keeps every expert as a module of its own.'
)


def carry_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give ``new`` the attributes and hooks of ``old``, in whose place it is; it may be a shard of it."""
    vars(new).update(_attributes(old))
    hooks, after = gradient_hooks(old), accumulation_hooks(old)
    shard = shard_of(new)
    if hooks and shard is not None:
        hooks = _one(_of_whole(hooks, shard))
    set_hooks_of_tensor(new, hooks, after)


def carry_over_stacked(parts: Sequence[nn.Parameter], stacked: nn.Parameter) -> None:
    """Give ``stacked`` the attributes and hooks of the parameters that it is made of."""
    vars(stacked).update(_attributes(parts[0]))
    all_hooks = [gradient_hooks(part) for part in parts]
    if not any(all_hooks):
        return

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        given = zip(all_hooks, gradient.unbind(), strict=True)
        return torch.stack([_call(hooks, part) if hooks else part for hooks, part in given])

    set_hooks_of_tensor(stacked, _one(hook), None)


def describe_hooks(model: nn.Module, found: Sequence[ExpertsModule], *, dense: bool) -> list[str]:
    """Return lines that must be equal on all ranks: gradient hooks of what will be sharded, which gather."""
    return [
        f"parameter {name}: {len(hooks)} gradient hooks"
        for parts in _replaced(model, found, dense=dense)
        for name, p in parts.items()
        if (hooks := gradient_hooks(p))
    ]


def check_carried(model: nn.Module, found: Sequence[ExpertsModule], *, dense: bool) -> None:
    """Raise ValueError for what hangs on parameters of experts, with ``dense`` of all, and cannot on shards."""
    for experts in found:
        _check_plain(experts)
    for parts in _replaced(model, found, dense=dense):
        for name, parameter in parts.items():
            _check_one(name, parameter)
        _check_alike(parts)


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


def _check_alike(parts: Mapping[str, nn.Parameter]) -> None:
    # Experts of a list become one parameter, which has one of every attribute.
    frozen = {name: not p.requires_grad for name, p in parts.items()}
    if len(set(frozen.values())) > 1:
        some = [name for name, is_frozen in frozen.items() if is_frozen]
        others = [name for name, is_frozen in frozen.items() if not is_frozen]
        raise ValueError(
            f"hecate.compile: {_few(some)} {'is' if len(some) == 1 else 'are'} frozen and {_few(others)} "
            f"{'is' if len(others) == 1 else 'are'} not, and the experts of a list become one parameter. {_HOW}"
        )
    (first, parameter), *rest = parts.items()
    expected = _attributes(parameter)
    for name, other in rest:
        own = _attributes(other)
        for key in sorted({*expected, *own}):
            if key not in expected or key not in own or not _equal(expected[key], own[key]):
                raise ValueError(
                    f"hecate.compile: {first} and {name} differ in their attribute {key!r} ({_shown(expected, key)} "
                    f"and {_shown(own, key)}), and the experts of a list become one parameter, which has one. Give "
                    'all experts the same, or use hecate.Config(policy="replicate").'
                )


def _replaced(model: nn.Module, found: Sequence[ExpertsModule], *, dense: bool) -> Iterator[dict[str, nn.Parameter]]:
    """Yield the parameters to be replaced, by name; in one dictionary those that become one parameter."""
    seen: set[int] = set()
    for experts in found:
        prefix = f"{experts.name}." if experts.name else ""
        labels = {id(module): label for label, module in children_of(experts.module).items()}
        for name in experts.names:
            parts = {f"{prefix}{labels[id(m)]}.{name}": m.get_parameter(name) for m in experts.members}
            seen.update(map(id, parts.values()))
            yield parts
        for key in () if experts.members else experts.parameters:
            parameter = parameters_of(experts.module)[key]
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield {prefix + key: parameter}
    for name, parameter in model.named_parameters() if dense else ():
        # A parameter of one row is kept whole.
        if id(parameter) not in seen and parameter.ndim and len(parameter) > 1:
            yield {name: parameter}


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
            return shard.slice(_call(hooks, shard.gather(gradient)))

    return hook


def _call(hooks: _Hooks, gradient: torch.Tensor) -> torch.Tensor:
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


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return bool(type(one) is type(other) and one == other)


def _shown(attributes: Mapping[str, Any], key: str) -> str:
    return repr(attributes[key])[:40] if key in attributes else "none"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} others"


class ParameterSites:
    """The sites of a model's parameters: ``(module, key)`` in the order of modules, several for a tied one."""

    def __init__(self, model: nn.Module) -> None:
        # Keyed by id, so that a parameter's memory is free as soon as it is replaced.
        self._of: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
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
