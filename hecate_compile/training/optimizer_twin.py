"""A copy of an optimizer that takes steps on other parameters than its own."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hecate.private import tree_leaves

# Most numbers that an optimizer may hold besides parameters and their state, and have copied.
_MOST_NUMBERS = 2**22
_LARGE_TENSORS = "it holds large tensors beside its parameters"


def twin_of(optimizer: Optimizer, stand_ins: dict[int, nn.Parameter]) -> Optimizer:
    """Return a copy that shares nothing with ``optimizer`` and has ``stand_ins``, by identity of its own parameters.

    Raises ValueError if it holds more numbers besides its parameters and their state than are copied.
    """
    memo = _Memo(stand_ins)
    # Modules are not copied: a copy would be as large as the model, and the model itself is not to be changed.
    memo.update((id(o), _Absent(type(o).__name__)) for o in gc.get_objects() if issubclass(type(o), nn.Module))
    twin = _copy(optimizer, memo)
    seen: set[int] = set()
    for group in twin.param_groups:
        once = [p for p in {id(p): p for p in group["params"]}.values() if id(p) not in seen]
        seen.update(map(id, once))
        group["params"][:] = once
        if "lr" in group and group["lr"] is not None:
            # A warm-up begins with a rate of zero, with which nothing would move.
            group["lr"] = group["lr"].clamp(min=0.01) if torch.is_tensor(group["lr"]) else max(group["lr"], 0.01)
    twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    return twin


class _Memo(dict[int, Any]):
    """The memo of ``copy.deepcopy``, which refuses more numbers than an optimizer may hold."""

    _numbers = 0

    def __setitem__(self, key: int, value: Any) -> None:
        self._numbers += value.numel() if isinstance(value, torch.Tensor) else 0
        if self._numbers > _MOST_NUMBERS:
            raise ValueError(_LARGE_TENSORS)
        super().__setitem__(key, value)


class _Absent:
    """A stand-in for a module, which an optimizer may hold as long as its step does without."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"its step uses a {self._kind} that it holds")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def _copy(optimizer: Optimizer, memo: _Memo) -> Optimizer:
    twin = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = twin
    own = dict(vars(optimizer))
    # Trainers put these around an optimizer's methods, or leave them in it for one step.
    for key in ("step", "zero_grad", "grad_scale", "found_inf"):
        own.pop(key, None)
    twin_state: dict[Any, Any] = defaultdict(dict)
    memo[id(own["state"])] = twin_state
    for key, value in own.items():
        if key.startswith("_optimizer_"):
            memo[id(value)] = OrderedDict()
        elif isinstance(value, Optimizer) and id(value) not in memo:
            # An optimizer's own way to be copied forgets attributes that its class has added.
            _copy(value, memo)
    beside = (value for key, value in own.items() if key not in ("state", "param_groups"))
    held = (leaf for value in beside if id(value) not in memo for leaf in tree_leaves(value))
    if sum(leaf.numel() for leaf in held if isinstance(leaf, torch.Tensor) and id(leaf) not in memo) > _MOST_NUMBERS:
        raise ValueError(_LARGE_TENSORS)
    vars(twin).update(copy.deepcopy(own, memo))
    # State before the first step was made with the optimizer, or loaded.
    for key, value in own["state"].items():
        stand_in = memo.get(id(key))
        if stand_in is None:
            twin_state[key] = copy.deepcopy(value, memo)
        elif all(not torch.is_tensor(part) or _can_be_resized(part, key) for part in value.values()):
            twin_state[stand_in] = {name: _resized(part, key, stand_in, memo) for name, part in value.items()}
    return twin


def _can_be_resized(value: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Return whether this is a number, or plain state of the parameter's shape: subclasses may lack operators."""
    return type(value) in (torch.Tensor, nn.Parameter) and (not value.ndim or value.shape == parameter.shape)


def _resized(value: Any, parameter: nn.Parameter, stand_in: nn.Parameter, memo: _Memo) -> Any:
    """Return state of ``parameter`` as ``stand_in`` would have it, unless it was made element by element."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return copy.deepcopy(value, memo)
    like = stand_in if value.dtype == parameter.dtype else stand_in.to(value.dtype)
    return torch.full_like(like, value.flatten()[0].item() if value.numel() else 0, requires_grad=False)
