"""The pickle of DCP's metadata, read without running anything that is in it.

It may do only what one of a few classes of plain data needs.
"""

from __future__ import annotations

import dataclasses
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hecate.checkpoints.manifest import CorruptError
from hecate.checkpoints.plain_data import DTYPES

METADATA = ".metadata"


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise CorruptError(f"{METADATA}: {what}")


_INSTANCES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata,
        _StorageInfo,
    )
}  # fmt: skip
_FIELDS: dict[type, set[str]] = {
    kind: {field.name for field in dataclasses.fields(kind)} for kind in _INSTANCES.values()
}


def _size(numbers: Any) -> torch.Size:
    expect(type(numbers) is tuple and len(numbers) <= 64 and all(type(n) is int for n in numbers), "a size is none")
    return torch.Size(numbers)


def _memory_format(number: Any) -> _MEM_FORMAT_ENCODING:
    expect(type(number) is int, "a memory format is none")
    return _MEM_FORMAT_ENCODING(number)


def _layout(name: Any) -> torch.layout:
    expect(type(name) is str and name == "torch.strided", "a layout is none")
    return torch.strided


# What is called by a name in the pickle, each with one argument.
_CALLED: dict[tuple[str, str], Callable[[Any], Any]] = {
    (torch.Size.__module__, torch.Size.__qualname__): _size,
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__qualname__): _memory_format,
    ("torch.serialization", "_get_layout"): _layout,
}
_OPCODES = {
    opcode.name: ord(opcode.code)
    for opcode in pickletools.opcodes
    if opcode.name
    in {
        "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
        "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS",
        "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL",
        "NEWOBJ", "REDUCE", "BUILD",
    }
}  # fmt: skip


class _Opcodes(dict[int, Any]):
    def __missing__(self, opcode: int) -> Any:
        raise CorruptError(f"{METADATA} has the opcode {opcode:#04x}, which is no part of a checkpoint")


class PlainUnpickler(pickle._Unpickler):
    """The opcodes that the pickle of metadata has, on the types that it has.

    In Python: of the one in C only the names can be limited. It sets attributes of classes, which stay set in this
    process; an index of a memo takes memory as large as it says; and a key that is a tuple of tuples of one tuple
    takes it forever to hash.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        found = _INSTANCES.get(key) or _CALLED.get(key)
        if found is None:
            raise CorruptError(f"{METADATA} names {module[:80]}.{name[:80]}, which is no part of a checkpoint")
        return found

    def _load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        expect(arguments == () and kind in _INSTANCES.values(), "an object is none")
        self.append(kind.__new__(kind))

    def _load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        known = any(function is one for one in _CALLED.values())
        expect(known and type(arguments) is tuple and len(arguments) == 1, "a value is none")
        self.append(function(arguments[0]))

    def _load_build(self) -> None:
        state = self.stack.pop()
        made: Any = self.stack[-1]
        fields = _FIELDS.get(type(made))
        if fields is None:
            raise CorruptError(f"{METADATA}: an object is none")
        if type(made) is TensorProperties:
            expect(type(state) is tuple and len(state) == 5, "the properties of a tensor are none")
            made.__setstate__(state)
            return
        expect(type(state) is dict and state.keys() <= fields, "an object has other fields")
        made.__dict__.update(state)

    def _load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set(self, items: list[Any]) -> None:
        target: Any = self.stack[-1]
        expect(type(target) is dict and len(items) % 2 == 0, "a dict is none")
        for key, value in zip(items[::2], items[1::2], strict=True):
            expect(type(key) is str or is_index(key), "a key is none")
            target[key] = value

    dispatch = _Opcodes(
        {code: pickle._Unpickler.dispatch[code] for code in _OPCODES.values()}
        | {
            _OPCODES["NEWOBJ"]: _load_newobj, _OPCODES["REDUCE"]: _load_reduce, _OPCODES["BUILD"]: _load_build,
            _OPCODES["SETITEM"]: _load_setitem, _OPCODES["SETITEMS"]: _load_setitems,
        }
    )  # fmt: skip


def is_index(key: Any) -> bool:
    return (
        type(key) is MetadataIndex and type(key.fqn) is str and (key.offset is None or type(key.offset) is torch.Size)
    )
