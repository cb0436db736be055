"""Numbers, texts, containers and tensors as JSON beside a safetensors file: nothing that runs when it is read."""

from __future__ import annotations

import base64
import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

_KIND = "~"


def write_plain(value: Any, path: Path) -> None:
    """Write ``value`` to ``path`` (.json), and tensors in it to a .safetensors file beside.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, set, dict, torch.Tensor, torch.dtype, numpy array or
            number, nested in any way.

    Raises:
        TypeError: names the place of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, "", tensors))
    path.write_text(text)
    if tensors:
        save_file(tensors, path.with_suffix(".safetensors"))


def read_plain(path: Path) -> Any:
    """What :func:`write_plain` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    beside = path.with_suffix(".safetensors")
    tensors = load_file(beside) if beside.exists() else {}
    try:
        return _decode(json.loads(path.read_text()), tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} does not hold what hecate.save writes: {error!r}") from error


def check_plain(value: Any, name: str) -> None:
    """Raise TypeError if :func:`write_plain` cannot write ``value``; ``name`` is for the message."""
    _encode(value, name, {})


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return _encode(value.item(), path, tensors)
    if isinstance(value, (bool, int, float, str)):
        # A member of an enumeration is its value.
        base = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return base(getattr(value, "value", value))
    if isinstance(value, list):
        return [_encode(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset, collections.deque)):
        kind = "tuple" if isinstance(value, tuple) else "deque" if isinstance(value, collections.deque) else "set"
        return {_KIND: kind, "items": [_encode(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: _encode(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}
        items = [
            [_encode(key, f"a key of {path}", tensors), _encode(item, f"{path}[{key!r}]", tensors)]
            for key, item in value.items()
        ]
        return {_KIND: "dict", "items": items}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        # A copy: two tensors in a file must not share memory.
        tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return {_KIND: "tensor", "key": key}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        key = str(len(tensors))
        tensors[key] = torch.from_numpy(np.array(value, order="C"))
        return {_KIND: "array", "key": key}
    raise TypeError(
        f"{path.lstrip('.') or 'the value'} is a {type(value).__name__}, which is not plain data: numbers, texts, "
        "lists, tuples, dicts, tensors and arrays are. Save its state_dict()"
    )


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind = value[_KIND]
    if kind == "dict":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]}
    if kind in ("tuple", "set", "deque"):
        container: Any = {"tuple": tuple, "set": set, "deque": collections.deque}[kind]
        return container(_decode(item, tensors) for item in value["items"])
    if kind == "bytes":
        return base64.b64decode(value["base64"])
    if kind == "dtype":
        dtype = getattr(torch, value["name"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"torch.{value['name']} is no dtype")
        return dtype
    if kind == "tensor":
        return tensors[value["key"]]
    if kind == "array":
        return tensors[value["key"]].numpy()
    raise KeyError(kind)
