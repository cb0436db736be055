"""A model as tensors for ``torch.distributed.checkpoint``, by the plain model's names; shards are logical tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hecate.compiled_model import is_compiled
from hecate.private import buffers_of, is_persistent, parameters_of
from hecate.runtime.ops.dense import DenseShard
from hecate.training.state_layout import is_for_all, lines_per_row
from hecate.wrap.expert_shards import is_expert_shard, is_member_shard
from hecate.wrap.shard import shard_of


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


@dataclass(frozen=True)
class Site:
    """A parameter under one of its names in the plain model's state dict."""

    name: str
    parameter: nn.Parameter

    @property
    def is_here(self) -> bool:
        """Tell whether this rank has something of the parameter, if each expert has one of its own."""
        shard = shard_of(self.parameter)
        return not is_member_shard(shard) or shard.owned

    def split(self, value: torch.Tensor, key: str = "") -> torch.Tensor:
        """Return the parameter, or the state ``key`` of an optimizer, as a part of the whole."""
        shard = shard_of(self.parameter)
        if shard is None or is_for_all(key, value):
            return value.detach()
        lines = lines_per_row(key, value.shape, self.parameter.shape)
        if lines is None and (shard.world.group is None or is_member_shard(shard)):
            # This rank has all of it.
            return value.detach()
        if lines is None:
            raise ValueError(
                f"{self.name} is split over ranks, and its optimizer state of the shape {list(value.shape)} cannot "
                f"be: it is not like the parameter, {list(self.parameter.shape)}"
            )
        if is_member_shard(shard):
            pieces = [Piece(0, 0, len(value))]
        elif is_expert_shard(shard):
            many = shard.lines * lines
            pieces = [Piece(expert * many, row * many, many) for row, expert in enumerate(shard.experts)]
        else:
            assert isinstance(shard, DenseShard)
            rank = shard.world.rank
            pieces = [Piece(sum(shard.counts[:rank]) * lines, 0, shard.counts[rank] * lines)]
        whole = torch.Size((shard.full_shape[0] * lines, *value.shape[1:]))
        return LogicalTensor.of(value, whole, pieces)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a tensor, or of the whole if it is a shard."""
    shard = shard_of(tensor)
    return tensor.shape if shard is None else shard.full_shape


def sites_of(model: nn.Module) -> Iterator[Site]:
    """Yield every parameter under every name, tied ones more than once; in the same order on all ranks."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in parameters_of(module).items():
            if parameter is not None:
                yield Site(f"{prefix}.{key}".lstrip("."), parameter)


def get_model_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers as tensors for ``torch.distributed.checkpoint``. No communication.

    Shards stay shards; ``torch.distributed.checkpoint.load`` fills them in place, whatever ranks and owners they were
    saved by. The names are those of the plain model.

    Args:
        model: a compiled model; for any other it is ``model.state_dict()``.
    """
    if not is_compiled(model):
        # Extra state of modules need not be a tensor; run_state saves that.
        return {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    state = {site.name: site.split(site.parameter) for site in sites_of(model)}
    state.update(persistent_buffers(model))
    return state


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are in state dicts, by the names that they have there."""
    return {
        f"{prefix}.{key}".lstrip("."): buffer.detach()
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, buffer in buffers_of(module).items()
        if buffer is not None and is_persistent(module, key)
    }
