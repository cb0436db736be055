"""The place of each tensor in the files that ``torch.distributed.checkpoint`` (DCP) wrote, and a reader of them.

The places are JSON. DCP's own metadata, a pickle, may run code: it is written for DCP's ``load``, and read as plain
data for format 1 alone.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import pickletools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from hecate.checkpoints.safety.files import CorruptError, FileRecord, open_plain, short
from hecate.checkpoints.safety.plain_data import DTYPES
from hecate.private import StorageInfo, narrow_tensor_by_index

INDEX, OLD_INDEX = "tensors.json", ".metadata"
# Tensors of other dtypes cannot be made, or not copied.
_TENSOR_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not re.match(r"q|u?int[1-7]$", name)}


def write_index(metadata: Metadata, path: Path) -> None:
    """Write what DCP's ``save`` returned: by name, dtype and size of a tensor, and the place of each chunk."""
    index = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor, and only tensors are saved by name")
        chunks = []
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            chunks.append([chunk.offsets, chunk.sizes, place.relative_path, place.offset, place.length])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "size": tensor.size, "chunks": chunks}
    path.write_text(json.dumps(index))


def read_index(folder: Path, files: Mapping[str, FileRecord], *, format: int) -> Metadata:
    """Read what :func:`write_index` wrote, in format 1 what DCP wrote; raise CorruptError if it cannot be that."""
    name = OLD_INDEX if format == 1 else INDEX
    read: Callable[[bytes], Any] = _read_pickle if format == 1 else json.loads
    if name not in files:
        raise CorruptError(f"{name} is missing")
    with open_plain(folder / name) as file:
        content = file.read()
    try:
        return _metadata_of(read(content), files)
    except Exception as error:
        # A file that was tampered with may lead to any error.
        raise CorruptError(f"{name}: {error if isinstance(error, CorruptError) else short(error)}") from error


def _metadata_of(index: Mapping[str, Any], files: Mapping[str, FileRecord]) -> Metadata:
    """Return an index as DCP's reader takes it; raise CorruptError if it contradicts itself."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, entry in index.items():
        dtype, size, chunks = _TENSOR_DTYPES[entry["dtype"]], _size(entry["size"]), []
        for offsets, sizes, file, start, length in entry["chunks"]:
            chunk = ChunkStorageMetadata(_size(offsets), _size(sizes))
            _expect(file in files, f"{name} is in {str(file)[:255]!r}, which is no file of the checkpoint")
            _size([start, length])
            # No more memory is asked for than there is on the disk.
            _expect(length >= math.prod(chunk.sizes) * dtype.itemsize, f"{name} is larger than its file")
            chunks.append(chunk)
            places[file].append((start, start + length))
            storage[MetadataIndex(name, chunk.offsets)] = StorageInfo(file, start, length)
        _check_cover(name, size, chunks)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    for file, spans in places.items():
        spans.sort()
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        _expect(apart and spans[-1][1] <= files[file].bytes, f"tensors in {file} are not where they were written")
    return Metadata(tensors, storage_data=storage)


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise CorruptError(problem)


def _size(numbers: Sequence[Any]) -> torch.Size:
    _expect(len(numbers) <= 64 and all(type(n) is int and n >= 0 for n in numbers), "a size is none")
    return torch.Size(numbers)


def _check_cover(name: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Check that every element is in exactly one chunk: missing experts would keep the values that they had."""
    for chunk in chunks:
        sides = zip(chunk.offsets, chunk.sizes, size, strict=True)
        _expect(all(o + n <= length for o, n, length in sides), f"{name} has a chunk outside of it")
    if 0 in size:
        return
    full = [chunk for chunk in chunks if 0 not in chunk.sizes]
    covered, elements = sum(math.prod(chunk.sizes) for chunk in full), math.prod(size)
    _expect(covered == elements, f"{name} has {covered} of {elements} elements")
    split = [d for d, length in enumerate(size) if any(chunk.sizes[d] != length for chunk in full)]
    _expect(len(split) <= 8, f"{name} is split in {len(split)} dimensions")
    # The corners of boxes, with alternating signs, determine the sum of the boxes: equal corners, equal sums.
    corners: Counter[tuple[int, ...]] = Counter()
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    for sign, chunk in [(-1, whole), *((1, chunk) for chunk in full)]:
        for ends in itertools.product((0, 1), repeat=len(split)):
            corner = tuple(chunk.offsets[d] + end * chunk.sizes[d] for d, end in zip(split, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    _expect(not any(corners.values()), f"{name} has chunks that overlap")


class TensorReader(FileSystemReader):
    """The tensors of one checkpoint, read by ``torch.load(weights_only=True)``, which runs nothing."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._metadata = folder, metadata
        # The index has no byte items, which DCP reads as pickles.
        self._expected: dict[MetadataIndex, tuple[torch.dtype, torch.Size]] = {
            MetadataIndex(name, chunk.offsets): (tensor.properties.dtype, chunk.sizes)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors; raise CorruptError if a file does not hold what the index says."""
        for item in plan.items:
            index = item.storage_index
            info = self._metadata.storage_data[index]
            try:
                with open_plain(self._folder / info.relative_path) as file:
                    tensor = torch.load(self._slice_file(file, info), map_location="cpu", weights_only=True)
                found = tensor.dtype, tensor.shape
                if found != self._expected[index]:
                    raise CorruptError(f"it is {found}, and the index says {self._expected[index]}")
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
            except OSError:
                raise
            except Exception as error:
                # A file that was tampered with may lead to any error.
                raise CorruptError(f"{info.relative_path}: {index.fqn} cannot be read: {short(error)}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


_DCP = "torch.distributed.checkpoint"
_CLASSES = {f"{_DCP}.filesystem._StorageInfo"} | {
    f"{_DCP}.metadata.{name}Metadata" for name in ("", "ChunkStorage", "TensorStorage")
}
_CLASSES |= {f"{_DCP}.metadata.{name}" for name in ("MetadataIndex", "StorageMeta", "TensorProperties")}
_FUNCTIONS = {"torch.Size", f"{_DCP}.metadata._MEM_FORMAT_ENCODING", "torch.serialization._get_layout"}
# Opcodes that DCP's pickle never has: names that are looked up elsewhere, and a memo of any size that it asks for.
_FORBIDDEN = {"EXT1", "EXT2", "EXT4", "BINPUT", "LONG_BINPUT", "PUT"}


class _Fields:
    """An object in the pickle, reduced to its stored fields."""

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _Unpickler(pickle.Unpickler):
    """Makes objects without behaviour of the few classes that are known, and imports nothing."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # A class of its own for each pickle: a pickle may set attributes of what it names.
        self._fields = type("Fields", (_Fields,), {})

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module}.{name}"
        if found in _CLASSES:
            return self._fields
        if found in _FUNCTIONS:
            return lambda value: value
        if module == "torch" and name in DTYPES:
            return name
        raise CorruptError(f"it names {found[:160]}, which is no part of a checkpoint")


def _read_pickle(content: bytes) -> dict[str, Any]:
    """Read DCP's pickle as plain data, in the form of later formats; torch's unpickler lacks its opcodes."""
    for opcode, _, _ in pickletools.genops(content):
        if opcode.name in _FORBIDDEN:
            raise CorruptError(f"it has the opcode {opcode.name}, which is no part of a checkpoint")
    metadata = _Unpickler(io.BytesIO(content)).load()
    places = {(key.fields["fqn"], key.fields["offset"]): p for key, p in metadata.fields["storage_data"].items()}
    index = {}
    for name, tensor in metadata.fields["state_dict_metadata"].items():
        chunks = []
        for chunk in tensor.fields["chunks"]:
            offsets, sizes = chunk.fields["offsets"], chunk.fields["sizes"]
            place = places[name, offsets].fields
            chunks.append([offsets, sizes, place["relative_path"], place["offset"], place["length"]])
        dtype = tensor.fields["properties"].fields[0]
        index[name] = {"dtype": dtype, "size": tensor.fields["size"], "chunks": chunks}
    return index
