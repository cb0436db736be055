"""A logical tensor, of which this rank has some pieces, for ``torch.distributed.checkpoint`` (DCP).

DCP asks for chunks by three methods (``torch/distributed/_checkpointable.py``); all that depends on these is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Piece:
    """A run of ``rows`` rows: from ``start`` on in this rank's part, from ``offset`` on in the whole."""

    offset: int
    start: int
    rows: int


class LogicalTensor(torch.Tensor):
    """A rank's part ``[n, ...]`` of a tensor of the shape ``whole``, ``[N, ...]``. Reading fills it in place."""

    whole: torch.Size
    pieces: tuple[Piece, ...]  # Empty if this rank has nothing of the tensor.

    @staticmethod
    def of(part: torch.Tensor, whole: torch.Size, pieces: Sequence[Piece]) -> LogicalTensor:
        """Return ``part`` as a part of a tensor of the shape ``whole``; the memory is shared."""
        tensor = part.detach().as_subclass(LogicalTensor)
        tensor.whole, tensor.pieces = whole, tuple(piece for piece in pieces if piece.rows)
        return tensor

    @property
    def part(self) -> torch.Tensor:
        """The rows of this rank, ``[n, ...]``."""
        return self.as_subclass(torch.Tensor)

    def with_part(self, part: torch.Tensor) -> LogicalTensor:
        """Return another part of the same shape with the same pieces."""
        return LogicalTensor.of(part, self.whole, self.pieces)

    def _chunk(self, piece: Piece) -> ChunkStorageMetadata:
        zeros = [0] * (len(self.whole) - 1)
        return ChunkStorageMetadata(
            offsets=torch.Size([piece.offset, *zeros]), sizes=torch.Size([piece.rows, *self.whole[1:]])
        )

    # --- what DCP calls ---

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole: DCP compares it with what was saved."""
        return self.whole if dim is None else self.whole[dim]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.part)
        chunks = [self._chunk(piece) for piece in self.pieces]
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offset = index.offset[0] if index.offset else 0
        for piece in self.pieces:
            if piece.offset == offset:
                return self.part[piece.start : piece.start + piece.rows]
        raise LookupError(f"hecate: this rank has no piece of {index.fqn} at {index.offset}")
