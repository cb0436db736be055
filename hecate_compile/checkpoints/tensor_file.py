"""A tensor as ``torch.save`` writes it, read without its pickle being run.

That is compared with the form in which torch writes every tensor, and gives no more than a dtype and a shape.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
import sys
import zipfile
from typing import Any

import torch

from hecate.checkpoints.plain_data import DTYPES

# A letter for each opcode in the pickle of a tensor, and what they spell.
_LETTERS = {
    "GLOBAL": "g", "MARK": "(", "BINUNICODE": "s", "BININT": "i", "BININT1": "i", "BININT2": "i", "LONG1": "i",
    "TUPLE": "t", "TUPLE1": "1", "TUPLE2": "2", "TUPLE3": "3", "EMPTY_TUPLE": "e", "BINPERSID": "p", "NEWFALSE": "b",
    "REDUCE": "r", "STOP": ".", "PROTO": "", "BINPUT": "", "LONG_BINPUT": "",
}  # fmt: skip
_SHAPE = r"(e|i1|ii2|iii3|\(i{4,64}t)"
_FORM = re.compile(rf"g\(\(sgssitpi{_SHAPE}{_SHAPE}bgerg?tr\.")
_STORAGES = {
    f"torch {name}": dtype
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    if not name.startswith("Q")
}


def read_tensor(stream: io.BufferedReader | io.BytesIO) -> torch.Tensor:
    """A tensor that ``torch.save`` wrote.

    Raises:
        ValueError: it is something else.
    """
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if _content(stream, entries["byteorder"], 16) != sys.byteorder.encode():
        raise ValueError("it has another order of bytes")
    key, dtype, numbers, shapes = _form(bytes(_content(stream, entries["data.pkl"], 4096)))
    buffer = _content(stream, entries[f"data/{key}"], numbers[0] * dtype.itemsize)
    if len(buffer) != numbers[0] * dtype.itemsize:
        raise ValueError(f"it has {len(buffer)} bytes, not {numbers[0] * dtype.itemsize}")
    flat = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype, device="cpu")
    size, stride = numbers[2 : 2 + shapes[0]], numbers[2 + shapes[0] :]
    return flat.as_strided(size, stride, numbers[1])


def _content(stream: io.BufferedReader | io.BytesIO, entry: zipfile.ZipInfo, most: int) -> bytearray:
    """What is in a file of an archive. Without its CRC, which torch need not write."""
    # More than there is must not be asked of the memory.
    most = min(most, stream.seek(0, io.SEEK_END))
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise ValueError(f"{entry.filename[:80]} is not as torch writes it")
    stream.seek(entry.header_offset)
    signature, name, extra = struct.unpack("<4s22xHH", stream.read(30))
    if signature != b"PK\x03\x04":
        raise ValueError("it is no archive")
    stream.seek(entry.header_offset + 30 + name + extra)
    buffer = bytearray(entry.file_size)
    view, start = memoryview(buffer), 0
    while start < len(view) and (read := stream.readinto(view[start:])):
        start += read
    if start < len(view):
        raise ValueError("it ends too early")
    return buffer


def _form(content: bytes) -> tuple[str, torch.dtype, list[int], tuple[int, int]]:
    """Name of the data, dtype; elements, offset, size and stride as one list; dimensions of size and of stride."""
    spelled, names, texts, numbers = "", list[str](), list[str](), list[int]()
    kept: dict[str, list[Any]] = {"g": names, "s": texts, "i": numbers}
    for opcode, argument, _ in pickletools.genops(content):
        letter = _LETTERS.get(opcode.name, "?")
        spelled += letter
        if letter in kept:
            kept[letter].append(argument)
    match = _FORM.fullmatch(spelled)
    if match is None or names[2] != "collections OrderedDict" or texts[0] != "storage" or texts[2] != "cpu":
        raise ValueError("it is no tensor")
    if names[0] == "torch._utils _rebuild_tensor_v2" and len(names) == 3:
        dtype = _STORAGES[names[1]]
    elif names[:2] == ["torch._utils _rebuild_tensor_v3", "torch.storage UntypedStorage"] and len(names) == 4:
        # For this form the storage is counted in bytes.
        dtype = DTYPES[names[3].removeprefix("torch ")]
        if numbers[0] % dtype.itemsize:
            raise ValueError("it is no tensor")
        numbers[0] //= dtype.itemsize
    else:
        raise ValueError("it is no tensor")
    return texts[1], dtype, numbers, (match[1].count("i"), match[2].count("i"))
