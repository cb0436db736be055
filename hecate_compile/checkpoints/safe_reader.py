"""Read what ``torch.distributed.checkpoint`` wrote without running anything that is in it.

DCP's ``.metadata`` is a pickle that it reads without limits, its byte items are read likewise, and the paths in it
may point anywhere. Here a pickle may name a short list of classes of plain data, byte items are refused, and files
are those of the manifest.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from hecate.checkpoints.manifest import CorruptError

METADATA = ".metadata"

_ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata,
        _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size,
    )
}  # fmt: skip
_ALLOWED[("torch.serialization", "_get_layout")] = lambda name: {"torch.strided": torch.strided}[name]
_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _ALLOWED:
            raise CorruptError(f"{METADATA} names {module}.{name}, which is no part of a checkpoint")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise CorruptError(f"{METADATA} refers to something outside of it")


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """What is in which file of a checkpoint.

    Args:
        files: names that it may refer to.

    Raises:
        CorruptError: it is no such thing, or names anything else.
    """
    try:
        content = (folder / METADATA).read_bytes()
        metadata = _PlainUnpickler(io.BytesIO(content)).load()
        _check(metadata, files)
    except CorruptError:
        raise
    except Exception as error:
        # Whatever a pickle that was tampered with leads to: it is not what was saved.
        raise CorruptError(f"{METADATA} cannot be read: {type(error).__name__}: {error}") from error
    found: Metadata = metadata
    return found


def _check(metadata: Any, files: Collection[str]) -> None:
    _expect(type(metadata) is Metadata, "it is no metadata")
    for name, tensor in metadata.state_dict_metadata.items():
        _expect(type(name) is str, "a name is no text")
        _expect(type(tensor) is TensorStorageMetadata, f"{name} is no tensor")
        _expect(type(tensor.properties) is TensorProperties, f"{name} has no properties")
        _expect(isinstance(tensor.properties.dtype, torch.dtype), f"{name} has no dtype")
        _expect(type(tensor.size) is torch.Size and all(n >= 0 for n in tensor.size), f"{name} has no size")
        _check_cover(name, tensor)
        for chunk in tensor.chunks:
            index = MetadataIndex(name, chunk.offsets)
            _expect(index in metadata.storage_data, f"{name} at {list(chunk.offsets)} is in no file")
    for index, info in metadata.storage_data.items():
        _expect(type(index) is MetadataIndex and type(info) is _StorageInfo, "storage of something else")
        _expect(
            info.relative_path in files, f"it points to {info.relative_path!r}, which is no file of the checkpoint"
        )
        _expect(type(info.offset) is int and type(info.length) is int, f"{index.fqn} has no place")
        _expect(min(info.offset, info.length) >= 0, f"{index.fqn} has no place")
        _expect(not info.transform_descriptors, f"{index.fqn} is transformed")


def _check_cover(name: str, tensor: TensorStorageMetadata) -> None:
    """Every element is in exactly one chunk. Experts that are missing would load as whatever was there before."""
    for chunk in tensor.chunks:
        _expect(type(chunk) is ChunkStorageMetadata, f"{name} has a chunk that is none")
        _expect(len(chunk.offsets) == len(chunk.sizes) == len(tensor.size), f"{name} has a chunk of other dimensions")
        inside = all(o >= 0 and n >= 0 and o + n <= d for o, n, d in zip(*_sides(chunk), tensor.size, strict=True))
        _expect(inside, f"{name} has a chunk outside of it")
    covered = sum(chunk.sizes.numel() for chunk in tensor.chunks)
    _expect(covered == tensor.size.numel(), f"{name} has {covered} of {tensor.size.numel()} elements")
    # With as many elements as the whole, none that overlap means that none are missing.
    rows = sorted((chunk.offsets, chunk.sizes) for chunk in tensor.chunks if chunk.sizes.numel())
    _expect(len({tuple(offsets) for offsets, _ in rows}) == len(rows), f"{name} has a chunk twice")
    whole_rows = all(tuple(sizes[1:]) == tuple(tensor.size[1:]) for _, sizes in rows)
    if whole_rows and len(tensor.size):
        ends = [offsets[0] + sizes[0] for offsets, sizes in rows]
        starts = [offsets[0] for offsets, _ in rows]
        _expect(all(a <= b for a, b in zip(ends, starts[1:], strict=False)), f"{name} has chunks that overlap")


def _sides(chunk: ChunkStorageMetadata) -> tuple[torch.Size, torch.Size]:
    return chunk.offsets, chunk.sizes


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise CorruptError(f"{METADATA}: {what}")


class SafeReader(FileSystemReader):
    """DCP's reader for one checkpoint whose metadata was read already.

    Tensors are read with ``weights_only=True``, as DCP does itself.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises CorruptError if a file does not hold what the metadata says."""
        try:
            return super().read_data(plan, planner)
        except (pickle.UnpicklingError, RuntimeError, AssertionError, ValueError, EOFError, KeyError) as error:
            first = str(error).split("\n", 1)[0]
            raise CorruptError(f"a tensor cannot be read: {type(error).__name__}: {first}") from error
