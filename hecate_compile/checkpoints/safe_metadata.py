"""What DCP's metadata says, and whether it can be true."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hecate.checkpoints.manifest import CorruptError, FileRecord, open_plain
from hecate.checkpoints.plain_data import DTYPES
from hecate.checkpoints.plain_pickle import METADATA, PlainUnpickler, expect, is_index


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """What is in which file of a checkpoint.

    Args:
        files: those that it may refer to.

    Raises:
        CorruptError: it is no such thing, or names anything else.
    """
    expect(METADATA in files, "it is missing")
    try:
        with open_plain(folder / METADATA) as file:
            metadata = PlainUnpickler(io.BytesIO(file.read())).load()
        _check(metadata, files)
    except (CorruptError, OSError):
        raise
    except Exception as error:
        # Whatever a pickle that was tampered with leads to: it is not what was saved.
        raise CorruptError(f"{METADATA} cannot be read: {short(error)}") from error
    # The rest is of no use to who loads.
    return Metadata(metadata.state_dict_metadata, storage_data=metadata.storage_data, version=metadata.version)


# The others cannot be made, or not copied.
_TENSOR_DTYPES = {dtype for name, dtype in DTYPES.items() if not re.match(r"q|u?int[1-7]$", name)}


def _check(metadata: Any, files: Mapping[str, FileRecord]) -> None:
    expect(type(metadata) is Metadata, "it is no metadata")
    expect(metadata.version is None or type(metadata.version) is str, "its version is none")
    tensors, storage = metadata.state_dict_metadata, metadata.storage_data
    expect(type(tensors) is dict and type(storage) is dict, "it is no metadata")
    for name, tensor in tensors.items():
        expect(type(name) is str, "a name is no text")
        expect(type(tensor) is TensorStorageMetadata and type(tensor.chunks) is list, f"{name} is no tensor")
    chunks = sum(len(tensor.chunks) for tensor in tensors.values())
    expect(chunks == len(storage), f"there are {chunks} chunks, and {len(storage)} in files")
    for name, tensor in tensors.items():
        expect(type(tensor.properties) is TensorProperties, f"{name} has no properties")
        expect(type(tensor.properties.dtype) is torch.dtype, f"{name} has no dtype")
        expect(tensor.properties.dtype in _TENSOR_DTYPES, f"{name} has a dtype that no tensor has")
        expect(type(tensor.size) is torch.Size and all(n >= 0 for n in tensor.size), f"{name} has no size")
        _check_cover(name, tensor)
        for chunk in tensor.chunks:
            info = storage.get(MetadataIndex(name, chunk.offsets))
            expect(info is not None, f"{name} at {list(chunk.offsets)} is in no file")
            expect(type(info) is _StorageInfo, f"{name} has no place")
            # So that no more memory is asked for than there is on the disk.
            needed = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            expect(type(info.length) is int and info.length >= needed, f"{name} is larger than its file")
    _check_places(storage, files)
    _check_paths(metadata.planner_data, tensors)


def _check_places(storage: dict[MetadataIndex, _StorageInfo], files: Mapping[str, FileRecord]) -> None:
    """Every chunk has bytes of its own in a file of the checkpoint."""
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, info in storage.items():
        expect(is_index(index) and type(info) is _StorageInfo, "storage of something else")
        path = info.relative_path
        expect(type(path) is str, "a path is no text")
        expect(path in files, f"it points to {path[:255]!r}, which is no file of the checkpoint")
        expect(type(info.offset) is int and type(info.length) is int, f"{index.fqn} has no place")
        expect(min(info.offset, info.length) >= 0, f"{index.fqn} has no place")
        expect(not info.transform_descriptors, f"{index.fqn} is transformed")
        places[path].append((info.offset, info.offset + info.length))
    for path, spans in places.items():
        spans.sort()
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        expect(apart and spans[-1][1] <= files[path].bytes, f"tensors in {path} are not where they were written")


def _check_paths(paths: Any, tensors: Collection[str]) -> None:
    """The names are there twice, whole and in parts: a rename of one tensor is a state that nobody saved."""
    if paths is None:
        return
    expect(type(paths) is dict and paths.keys() == set(tensors), "names and paths differ")
    for name, path in paths.items():
        plain = type(path) is tuple and len(path) <= 64 and all(type(part) in (str, int) for part in path)
        expect(plain and ".".join(map(str, path)) == name, f"{name} has another path")


def _check_cover(name: str, tensor: TensorStorageMetadata) -> None:
    """Every element is in exactly one chunk. Experts that are missing would load as whatever was there before."""
    for chunk in tensor.chunks:
        expect(type(chunk) is ChunkStorageMetadata, f"{name} has a chunk that is none")
        expect(type(chunk.offsets) is type(chunk.sizes) is torch.Size, f"{name} has a chunk that is none")
        expect(len(chunk.offsets) == len(chunk.sizes) == len(tensor.size), f"{name} has a chunk of other dimensions")
        sides = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        expect(all(o >= 0 and n >= 0 and o + n <= d for o, n, d in sides), f"{name} has a chunk outside of it")
    if 0 in tensor.size:
        return
    full = [chunk for chunk in tensor.chunks if 0 not in chunk.sizes]
    covered = sum(math.prod(chunk.sizes) for chunk in full)
    elements = math.prod(tensor.size)
    expect(covered == elements, f"{name} has {covered} of {elements} elements")
    split = [d for d, length in enumerate(tensor.size) if any(chunk.sizes[d] != length for chunk in full)]
    expect(len(split) <= 8, f"{name} is split in {len(split)} dimensions")
    # Corners, with alternating signs, say all about a sum of boxes: equal corners, equal sums.
    corners: Counter[tuple[int, ...]] = Counter()
    whole = ChunkStorageMetadata(torch.Size([0] * len(tensor.size)), tensor.size)
    for sign, chunk in [(-1, whole), *((1, chunk) for chunk in full)]:
        for ends in itertools.product((0, 1), repeat=len(split)):
            corner = tuple(chunk.offsets[d] + end * chunk.sizes[d] for d, end in zip(split, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    expect(not any(corners.values()), f"{name} has chunks that overlap")


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
