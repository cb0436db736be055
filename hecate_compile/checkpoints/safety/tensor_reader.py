"""DCP's reader on an index that was read as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from hecate.checkpoints.safety.files import CorruptError, open_plain, short
from hecate.private import narrow_tensor_by_index


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
