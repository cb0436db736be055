"""Memory to which every rank of a machine may write: one window of each rank, with a part for each writer.

A window has two places, a place has a segment for each source, and a segment holds a chunk of rows. A board has a
word for each place and source. Each byte has one writer; ``transport`` says when it may write.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hecate.private import symmetric_memory
from hecate.runtime.comm.agreement import gather_json
from hecate.runtime.comm.world import World

# Two places suffice: a rank that signals a chunk has taken the chunk before, so the next one may use its place.
PLACES = 2
# Segments are multiples of so many bytes, which are 16 numbers of any dtype: kernels move vectors.
ALIGNMENT = 128
# The folder where Linux keeps files in memory, and processors that store in order and load in order.
_SHARED = Path("/dev/shm")
_IN_ORDER = ("x86_64", "amd64")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Windows:
    """All ranks' windows, uint8 ``[places, W, segment]``, and signals, int64 ``[places, W]``, zero at first.

    The tensors at ``rank`` are this rank's own memory; ``owner`` keeps the memory of others mapped.
    """

    rank: int
    data: Sequence[Tensor]
    signals: Sequence[Tensor]
    owner: object = None

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def segment(self) -> int:
        """Bytes of one chunk."""
        return self.data[self.rank].shape[2]

    @property
    def device(self) -> torch.device:
        return self.data[self.rank].device


def local_windows(world_size: int, segment: int, device: torch.device, *, places: int = PLACES) -> list[Windows]:
    """Return each rank's view of windows in this process; ``segment`` bytes are rounded up to :data:`ALIGNMENT`."""
    segment = _aligned(segment)
    size = _bytes_of(world_size, segment, places)
    memories = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world_size)]
    return [_view(rank, memories, segment, places) for rank in range(world_size)]


def symmetric_windows(world: World, segment: int) -> Windows:
    """Create windows of processes with a GPU each that reaches the others' memory. A collective.

    Several processes may share a GPU if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. Not run over NVLink yet. Raises
    RuntimeError on all ranks if one has no room, or does not reach the others' memory.
    """
    group = world.group
    assert group is not None, "one rank has nobody to share memory with"
    segment = _aligned(segment)
    size = _bytes_of(world.size, segment, PLACES)

    def exchange() -> tuple[Any, list[Tensor]]:
        handle = symmetric_memory().rendezvous(mine, group)
        memories = [handle.get_remote_tensor(peer, mine.shape, mine.dtype) for peer in range(world.size)]
        if memories[world.rank].data_ptr() != mine.data_ptr():
            raise RuntimeError("symmetric memory maps this rank's window to another address than its own")
        # No rank may put before all words are zero.
        torch.cuda.synchronize(world.device)
        return handle, memories

    # If a rank has no room, no rank comes to the rendezvous.
    mine = _on_all(lambda: symmetric_memory().empty(size, dtype=torch.uint8, device=world.device).zero_(), world)
    handle, memories = _on_all(exchange, world)
    return _view(world.rank, memories, segment, PLACES, owner=(handle, mine))


def shared_windows(world: World, segment: int) -> Windows:
    """Create windows of processes of one machine, in memory that they share: on CPUs. A collective.

    Each rank maps the files of all; they have no name any more when this returns, so they go with the last process.
    Words are posted by plain 8-byte stores, which an x86 shows in the order in which they are made; other processors
    are refused. Raises RuntimeError on all ranks: another processor, no room in /dev/shm, or several machines.
    """
    segment = _aligned(segment)
    size = _bytes_of(world.size, segment, PLACES)
    # All ranks have come after this, so that a file has its name for a moment only.
    _on_all(_check_order, world)
    path = _SHARED / f"hecate-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        _on_all(lambda: _make_file(path, size), world)
        paths = [Path(text) for text in gather_json(str(path), world)]
        # After this all ranks have mapped all files, and all words are zero.
        memories = _on_all(lambda: _map_files(paths, size), world)
    finally:
        path.unlink(missing_ok=True)
    return _view(world.rank, memories, segment, PLACES)


def _check_order() -> None:
    if platform.machine().lower() not in _IN_ORDER:
        raise RuntimeError(f"{platform.machine()} processors do not keep the order of plain stores")


def _make_file(path: Path, size: int) -> None:
    """Make a file of zeros in memory."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # All of it is allocated now: a write for which there is no room ends the process.
            os.posix_fallocate(number, 0, size)
        finally:
            os.close(number)
    except OSError as error:
        raise RuntimeError(f"{size} bytes in {_SHARED}: {error.strerror}") from error


def _map_files(paths: Sequence[Path], size: int) -> list[Tensor]:
    """Map the memory of every rank."""
    if missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
        raise RuntimeError(f"the memory of ranks {missing} is on another machine")
    return [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]


def _on_all(make: Callable[[], T], world: World) -> T:
    """Return the result of ``make``, or raise RuntimeError on all ranks if it does on any. A collective."""
    made, problem = None, None
    try:
        made = make()
    except RuntimeError as error:
        problem = str(error)
    for rank, text in enumerate(gather_json(problem, world)):
        if text is not None:
            raise RuntimeError(f'hecate: ranks cannot share memory, use transport="collectives". Rank {rank}: {text}')
    return cast(T, made)


def _aligned(segment: int) -> int:
    return max(1, -(-segment // ALIGNMENT)) * ALIGNMENT


def _bytes_of(world_size: int, segment: int, places: int) -> int:
    return places * world_size * (segment + torch.int64.itemsize)


def _view(rank: int, memories: Sequence[Tensor], segment: int, places: int, owner: object = None) -> Windows:
    words = places * len(memories)
    parts = [memory.split([words * segment, words * torch.int64.itemsize]) for memory in memories]
    return Windows(
        rank=rank,
        data=[part[0].view(places, len(memories), segment) for part in parts],
        signals=[part[1].view(torch.int64).view(places, len(memories)) for part in parts],
        owner=owner,
    )
