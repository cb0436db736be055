"""Read what ``torch.distributed.checkpoint`` wrote without running anything that is in it.

DCP's ``.metadata`` is a pickle that it reads without limits, its byte items are read likewise, and the paths in it
may point anywhere. Here it is read as plain data (``safe_metadata``), byte items are refused, files are those of the
manifest, and tensors are read as bytes (``tensor_file``).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from hecate.checkpoints.manifest import CorruptError, open_plain
from hecate.checkpoints.plain_pickle import METADATA
from hecate.checkpoints.safe_metadata import short
from hecate.checkpoints.tensor_file import read_tensor


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        read = self._file.readinto(view)
        self._at += read
        return read


class SafeReader(FileSystemReader):
    """DCP's reader for one checkpoint whose metadata was read already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._metadata = folder, metadata
        self._sizes = {
            MetadataIndex(name, chunk.offsets): chunk.sizes
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises CorruptError if a file does not hold what the metadata says."""
        for item in plan.items:
            index = item.storage_index
            info = self._metadata.storage_data[index]
            with open_plain(self._folder / info.relative_path) as file:
                tensor = self._read(file, index, info)
            part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise CorruptError(f"{index.fqn} has the shape {list(part.size())}, not {list(target.size())}")
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: io.BufferedReader, index: MetadataIndex, info: _StorageInfo) -> torch.Tensor:
        where = f"{info.relative_path}: {index.fqn}"
        try:
            tensor = read_tensor(io.BufferedReader(_Part(file, info.offset, info.length)))
        except OSError:
            raise
        except Exception as error:
            # Whatever a file that was tampered with leads to: it is not what was saved.
            raise CorruptError(f"{where} cannot be read: {short(error)}") from error
        found = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(found, TensorStorageMetadata)
        if tensor.dtype != found.properties.dtype or tensor.shape != self._sizes[index]:
            raise CorruptError(
                f"{where} is {tensor.dtype} {list(tensor.shape)}, and {METADATA} says {found.properties.dtype} "
                f"{list(self._sizes[index])}"
            )
        return tensor
