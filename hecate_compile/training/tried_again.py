"""What a forward changes outside of itself, given back before it is tried again.

A first forward may end in code that no graph can have, after other code has run (see ``wrap/whole_layers``). The next
try must find what this one found: buffers, random numbers, caches and lists that it was given, counters of modules.
What would have to be kept twice, parameters and inputs, must not have changed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hecate.private import buffers_of, version_of

_NUMBERS = (int, float, str, bool, type(None))
# What modules have from torch, and what may be replaced by one that runs as Python.
_INTERNAL = {*vars(nn.Module()), "forward"}


def remember(model: nn.Module, given: Any) -> Callable[[], None]:
    """Return what gives the model, torch's random numbers and all that is in ``given`` back what they have now.

    It raises RuntimeError if a parameter, or a tensor in ``given``, has been changed in place since.
    """
    # A module's own tensors, be they buffers or not.
    tensors = [
        (holder, key, tensor, _version(tensor), tensor.detach().clone())
        for module in model.modules()
        for holder in (buffers_of(module), vars(module))
        for key, tensor in holder.items()
        if isinstance(tensor, torch.Tensor)
    ]
    numbers = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    objects: list[Callable[[], None]] = []
    seen: set[int] = set()
    _remember(given, objects, seen)
    for name, parameter in model.named_parameters():
        objects.append(partial(_check_parameter, name, parameter, _version(parameter)))
    attributes = [(m, {key: value for key, value in vars(m).items() if _is_own(key)}) for m in model.modules()]
    for _, own in attributes:
        for value in own.values():
            if isinstance(value, (list, dict, set, deque)):
                _remember(value, objects, seen)

    @torch.no_grad()
    def give_back() -> None:
        for module, own in attributes:
            _give_attributes(module, own)
        for holder, key, tensor, version, value in tensors:
            # One that nobody has changed may be wanted by a backward, or share its memory with itself.
            if _version(tensor) != version:
                tensor.copy_(value)
            # One of inference mode cannot be written outside of it.
            holder[key] = value if tensor.is_inference() else tensor
        torch.set_rng_state(numbers)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        for one in objects:
            one()

    return give_back


def _remember(value: Any, objects: list[Callable[[], None]], seen: set[int]) -> None:
    """Add to ``objects`` what gives a value back what it has."""
    if id(value) in seen or isinstance(value, (nn.Module, type, *_NUMBERS)) or callable(value):
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, torch.Tensor):
        objects.append(partial(_check, value, _version(value)))
    elif isinstance(value, (list, set, deque)):
        inside = list(value)
        objects.append(partial(_refill, value, list(value)))
    elif isinstance(value, dict):
        inside, items = list(value.values()), dict(value)
        objects.append(partial(_refill, value, items))
    elif isinstance(value, tuple):
        inside = list(value)
    elif hasattr(value, "__dict__"):
        attributes = dict(vars(value))
        inside = list(attributes.values())
        objects.append(partial(_refill, value.__dict__, attributes))
    for one in inside:
        _remember(one, objects, seen)


def _is_own(key: str) -> bool:
    return key not in _INTERNAL and "_hecate_" not in key


def _give_attributes(module: nn.Module, own: dict[str, Any]) -> None:
    attributes = module.__dict__
    for key in [key for key in attributes if _is_own(key) and key not in own]:
        del attributes[key]
    attributes.update(own)


def _refill(container: Any, before: Any) -> None:
    # Not by methods of a library's class, which may forbid it.
    fills: dict[Any, Any] = {
        list: list.extend,
        deque: deque.extend,
        set: set.update,
        OrderedDict: OrderedDict.update,
        dict: dict.update,
    }
    kind = next(kind for kind in fills if isinstance(container, kind))
    kind.clear(container)
    fills[kind](container, before)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _check_parameter(name: str, parameter: torch.Tensor, version: int) -> None:
    if _version(parameter) != version:
        raise RuntimeError(
            f"hecate: the first forward has changed {name} in place, and must be tried again, because code in it "
            "cannot be traced; a second one would change it twice. Build the model anew with a buffer in the "
            "parameter's place, which is given back, or change it after the forward."
        )


def _check(tensor: torch.Tensor, version: int) -> None:
    if _version(tensor) != version:
        raise RuntimeError(
            "hecate: the first forward has changed a tensor in place that it was given, or that an object of the "
            "model's has, and must be tried again, because code in it cannot be traced. Call the model once more, "
            "with new inputs: it runs that code as Python now."
        )
