"""Memory that every rank of a machine may write to: one window of each rank, and who owns which part of it.

A window has a few places, a place has a segment for each source, and a segment holds a chunk of rows. Beside them lie
two boards of words, one word for each place and rank: in ``signals`` sources say what they have put into this window,
in ``credits`` readers say what they have taken of what this rank put into theirs. Each byte has one writer: segment
and words of a rank are that rank's, in every window. ``hecate.runtime.ops.one_sided`` says when it may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Two: what is put next need not wait until everyone has taken what was put last.
PLACES = 2
# A segment has a multiple of so many bytes, which are 16 numbers of any dtype: kernels move vectors.
ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of all ranks, as one rank sees them.

    Attributes:
        rank: whose view it is; the tensors with its number are its own memory.
        data: of each rank, uint8 ``[places, W, segment]``.
        signals, credits: of each rank, int64 ``[places, W]``; zero at the beginning.
        owner: what keeps the memory of others mapped.
    """

    rank: int
    data: Sequence[Tensor]
    signals: Sequence[Tensor]
    credits: Sequence[Tensor]
    owner: object = None

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def places(self) -> int:
        return self.data[self.rank].shape[0]

    @property
    def segment(self) -> int:
        """Bytes of one chunk."""
        return self.data[self.rank].shape[2]

    @property
    def device(self) -> torch.device:
        return self.data[self.rank].device


def local_windows(world_size: int, segment: int, device: torch.device, *, places: int = PLACES) -> list[Windows]:
    """Windows of ranks that are all in this process: each rank's view of the same memory.

    Args:
        segment: bytes of a chunk, rounded up to what vectors need.
    """
    segment = _aligned(segment)
    size = _bytes_of(world_size, segment, places)
    memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world_size)]
    return [_view(rank, memories, segment, places) for rank in range(world_size)]


def symmetric_windows(
    group: dist.ProcessGroup, segment: int, device: torch.device, *, places: int = PLACES
) -> Windows:
    """Windows of the ranks of ``group``, each a process with a GPU that reaches the others' memory. A collective.

    Several processes may share a GPU if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. Not run on a GPU yet.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    segment, rank, world_size = _aligned(segment), dist.get_rank(group), dist.get_world_size(group)
    size = _bytes_of(world_size, segment, places)
    mine = symmetric_memory.empty(size, dtype=torch.uint8, device=device).zero_()
    handle = symmetric_memory.rendezvous(mine, group)
    memories = [handle.get_remote_tensor(peer, mine.shape, mine.dtype) for peer in range(world_size)]
    if memories[rank].data_ptr() != mine.data_ptr():
        raise RuntimeError("hecate: symmetric memory maps this rank's window to another address than its own")
    # Nobody puts before all words are zero.
    handle.barrier()
    return _view(rank, memories, segment, places, owner=(handle, mine))


def _aligned(segment: int) -> int:
    return max(1, -(-segment // ALIGNMENT)) * ALIGNMENT


def _bytes_of(world_size: int, segment: int, places: int) -> int:
    return places * world_size * (segment + 2 * torch.int64.itemsize)


def _view(rank: int, memories: Sequence[Tensor], segment: int, places: int, owner: object = None) -> Windows:
    words = places * len(memories)
    sizes = [words * segment, words * torch.int64.itemsize, words * torch.int64.itemsize]
    parts = [memory.split(sizes) for memory in memories]
    boards = [[part[board].view(torch.int64).view(places, len(memories)) for part in parts] for board in (1, 2)]
    return Windows(
        rank=rank,
        data=[part[0].view(places, len(memories), segment) for part in parts],
        signals=boards[0],
        credits=boards[1],
        owner=owner,
    )
