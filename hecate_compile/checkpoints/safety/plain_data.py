"""Numbers, texts, containers and tensors as JSON and a safetensors file: nothing that runs when it is read."""

from __future__ import annotations

import base64
import collections
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from hecate.checkpoints.safety.files import open_plain

DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_KIND = "~"
# No state is nested deeper; what is could be written and yet not be read, from a caller that is deeper in the stack.
_DEPTH = 100
# Python refuses to write integers of more than 4300 digits as a text.
_BITS = 8192
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque)}
_MALFORMED = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError, SafetensorError)


def write_plain(value: Any, path: Path) -> None:
    """Write ``value`` to ``path`` (.json), and tensors in it to a .safetensors file with the same stem.

    It is plain data, nested up to a depth of 100; a TypeError names the place of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, "", tensors))
    path.write_text(text)
    if tensors:
        save_file(tensors, path.with_suffix(".safetensors"))


def read_plain(path: Path) -> Any:
    """Read what :func:`write_plain` wrote; raise ValueError if the file holds something else."""
    try:
        with open_plain(path) as file:
            value = json.loads(file.read())
        tensors: Mapping[str, torch.Tensor] = {}
        # Only if the JSON refers to it: a file that nobody saved must not be read.
        if _has_tensors(value):
            with open_plain(path.with_suffix(".safetensors")) as file:
                tensors = load(file.read())
        return _decode(value, tensors)
    except _MALFORMED as error:
        said = repr(error)
        raise ValueError(
            f"{path.name} does not hold what hecate.save writes: {said if len(said) < 200 else said[:200] + '...'}"
        ) from error


def check_plain(value: Any, name: str) -> None:
    """Raise TypeError if :func:`write_plain` cannot write ``value``; ``name`` is for the message."""
    _encode(value, name, {})


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        return value if value.bit_length() <= _BITS else {_KIND: "int", "hex": hex(value)}
    if depth > _DEPTH:
        raise TypeError(f"{_place(path)[:80]}... is nested more than {_DEPTH} deep, or contains itself")

    def inner(item: Any, place: str) -> Any:
        return _encode(item, place, tensors, depth + 1)

    # A number that Python has no type for, such as a long double, stays a number of numpy.
    if isinstance(value, np.generic) and not isinstance(plain := value.item(), np.generic):
        return inner(plain, path)
    if isinstance(value, (bool, int, float, str)):
        # A member of an enumeration is written as its value.
        base = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return inner(base(getattr(value, "value", value)), path)
    if isinstance(value, list):
        return [inner(item, f"{path}[{index}]") for index, item in enumerate(value)]
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            out = {_KIND: name, "items": [inner(item, f"{path}[{index}]") for index, item in enumerate(value)]}
            return out | ({"most": value.maxlen} if isinstance(value, collections.deque) else {})
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: inner(item, f"{path}[{key!r}]") for key, item in value.items()}
        items = [[inner(key, f"a key of {path}"), inner(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {_KIND: "dict", "items": items}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = _storable(value, path)
        return {_KIND: "tensor", "key": key}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.itemsize <= 16:
        key = str(len(tensors))
        try:
            # torch knows only this machine's order of bytes.
            native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C", subok=False)
            tensors[key] = _storable(torch.from_numpy(native), path)
        except TypeError as error:
            raise TypeError(f"{_place(path)} is an array of {value.dtype}, which cannot be saved") from error
        return {_KIND: "array", "key": key}
    raise TypeError(
        f"{_place(path)} is a {type(value).__name__}, which is not plain data: numbers, texts, "
        "lists, tuples, dicts, tensors and arrays are. Save its state_dict()"
    )


def _place(path: str) -> str:
    return path.lstrip(".") or "the value"


def _storable(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return a copy on the CPU: two tensors in a file must not share memory."""
    what = ""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        what = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        what = f"a tensor with the layout {tensor.layout}, on {tensor.device.type}"
    elif not _has_dtype(tensor.dtype):
        what = f"a tensor of {tensor.dtype}"
    if what:
        raise TypeError(f"{_place(path)} is {what}, which cannot be saved as plain data")
    return tensor.detach().to("cpu", copy=True).contiguous()


@cache
def _has_dtype(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype, device="cpu")})
    except (KeyError, ValueError, TypeError, RuntimeError, SafetensorError):
        return False
    return True


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get(_KIND) in ("tensor", "array") or any(_has_tensors(item) for item in value.values())
    return isinstance(value, list) and any(_has_tensors(item) for item in value)


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind = value[_KIND]
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]}
    if kind in _CONTAINERS:
        items = [_decode(item, tensors) for item in value["items"]]
        return collections.deque(items, value.get("most")) if kind == "deque" else _CONTAINERS[kind](items)
    if kind == "int":
        return int(value["hex"], 16)
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind == "dtype":
        return DTYPES[value["name"]]
    if kind == "tensor":
        return tensors[value["key"]]
    if kind == "array":
        return tensors[value["key"]].numpy()
    raise KeyError(kind)
