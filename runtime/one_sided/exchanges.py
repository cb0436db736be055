"""Exchanges of rows, replicas and their gradients between ranks as one-sided writes, with all their steps.

If ranks do not come, the host raises where it waits; where kernels wait, results are NaN, and the host learns of it
later (``LateNews``). Launches are the same for all placements for which ``ExpertTables`` have room. Sums are made in
the order of ``sparse_collectives``: gradients are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hecate.runtime.comm.start import timeout_of
from hecate.runtime.comm.supervise import begin, supervised_waits
from hecate.runtime.comm.world import World
from hecate.runtime.kernels.clear_rows import clear_rows_behind
from hecate.runtime.kernels.launch import runs_on
from hecate.runtime.kernels.operands import flat_rows
from hecate.runtime.kernels.pack_experts import pack_experts, widths_of
from hecate.runtime.kernels.sum_replicas import sum_replicas
from hecate.runtime.one_sided.device_tables import ExpertTables
from hecate.runtime.one_sided.links import Rows
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import shared_windows, symmetric_windows
from hecate.runtime.ops.sparse_collectives import by_dtype, room_like, sum_dtype, with_sums

# Bytes of a chunk of a link; a rank's window has two for each rank. On a GPU, where each chunk costs launches, bytes
# of all links together: the more ranks there are, the fewer rows go to each. With this, 65,536 rows of 4 KB and room
# for twice as many take 6 chunks among 8 ranks, as all of them may go over one link. Not tuned.
_SEGMENT, _SEGMENTS = 2**20, 3 * 2**28
# The part of a group's timeout after which a kernel gives up. Other collectives wait behind it on the stream, and
# their watchdog would end the process and could not say who was late.
_PATIENCE = 0.9
# Most bytes of a piece of an expert: an expert is megabytes, and kernels take rows of some thousand numbers.
_PIECE = 2**14


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Exchanges of rows and replicas, for all layers of a model."""

    world: World
    transport: Transport

    @classmethod
    def between(cls, world: World) -> Exchanges:
        """Create exchanges over memory that the ranks of ``world`` share, or raise RuntimeError. A collective."""
        assert world.group is not None, "one rank has nobody to send rows to"
        seconds = timeout_of(world.group) * (1.0 if _host_waits(world.device) else _PATIENCE)
        if world.device.type == "cpu":
            return cls(world, Transport(shared_windows(world, _SEGMENT), seconds=seconds))
        transport = Transport(symmetric_windows(world, segment_on_gpu(world.size)), seconds=seconds)
        # The transport's tensors were made on the stream of the compute, and exchanges run on another.
        torch.cuda.synchronize(world.device)
        return cls(world, transport)

    def exchange(
        self,
        leaving: Rows,
        sends: Tensor,
        arriving: Rows,
        *,
        most: int,
        wire: torch.dtype,
        expects: Tensor,
        excess: Tensor | None = None,
    ) -> None:
        """Run all :meth:`Transport.steps`; rows that come fill the front of ``arriving``, and after them are zeros.

        If rows did not come it raises; where the host does not wait, ``arriving`` is all NaN then, and 0 in whole
        numbers. So it is if ``excess``, int64 ``[W]``, names rows for which a rank has no room.
        """
        group, rows = self.world.group, arriving.tensor
        steps = partial(self.transport.steps, leaving, sends, arriving, most=most, wire=wire, expects=expects)
        if group is not None:
            # It is recorded as one row: ranks need not have equally many.
            begin("one_sided", rows.new_empty((), dtype=wire).expand(rows.shape[1:]), group)
        if not _host_waits(self.world.device):
            _walk(steps())
        elif group is None:
            _walk(steps())
            self.transport.check()
        else:
            with supervised_waits(group) as stop:
                _walk(steps(stop=stop))
                self.transport.check()
        faults = self.transport.faults
        lost = (faults if excess is None else torch.cat([faults, excess.unsqueeze(0)])).any()
        clear_rows_behind(flat_rows(rows), expects.sum(0, keepdim=True), lost)

    def carry(self, experts: Tensor, sends: Tensor, receives: Tensor, *, room: int, most: int) -> Tensor:
        """Bring experts, rank by rank, to other ranks: ``[n, width] -> [room, width]``, a view, filled up with zeros.

        ``sends`` and ``receives`` are int64 ``[W]`` on the device; no link has more than ``most`` experts.
        """
        width = experts.shape[1]
        piece = piece_of(width, experts.dtype, self.transport.windows.segment)
        pieces = -(-width // piece)
        rest = pieces * piece - width
        padded = (torch.nn.functional.pad(experts, (0, rest)) if rest else experts).contiguous()
        leaving = Rows(padded.view(len(experts) * pieces, piece))
        arriving = padded.new_empty((room * pieces, piece))
        self.exchange(
            leaving, sends * pieces, Rows(arriving), most=most * pieces, wire=experts.dtype, expects=receives * pieces
        )
        return arriving.view(room, pieces * piece)[:, :width]


def gather_replicas(
    exchanges: Exchanges, tables: ExpertTables, shards: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """Pack experts that leave, and return a function that sends them: ``[E_r, ...] -> [K, ...]`` of each tensor."""
    groups = by_dtype([shard.dtype for shard in shards])
    widths, shapes = widths_of(shards), [shard.shape[1:] for shard in shards]
    # Experts that leave are copied: an optimizer may step before they have left.
    packed = [pack_experts([shards[place] for place in group], tables.leave) for group in groups]
    replicas = [shard.new_empty((tables.replicas, *shard.shape[1:])) for shard in shards]

    def run() -> list[Tensor]:
        for group, leaving in zip(groups, packed, strict=True):
            came = leaving[:0]
            if tables.travels:
                came = exchanges.carry(leaving, tables.sends, tables.receives, room=tables.replicas, most=tables.most)
            for place, part in zip(group, came.split([widths[place] for place in group], dim=1), strict=True):
                replicas[place].copy_(part.view(len(part), *shapes[place]))
        return replicas

    return run


def reduce_replicas(
    exchanges: Exchanges, tables: ExpertTables, own: Sequence[Tensor], replicas: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """Pack gradients, and return a function that gives owners the mean: ``[E_r, ...], [K, ...] -> [E_r, ...]``."""
    world_size = exchanges.world.size
    groups, widths = by_dtype([grad.dtype for grad in own]), widths_of(own)
    packed = [
        torch.cat([replicas[place].reshape(len(replicas[place]), widths[place]) for place in group], dim=1)
        for group in groups
    ]
    means = [torch.div(grad, world_size, out=room_like(grad)) for grad in own]
    sums = [pack_experts([grad], tables.summed, dtype=sum_dtype(grad.dtype)) for grad in own]

    def run() -> list[Tensor]:
        if not tables.travels:
            return means
        for group, leaving in zip(groups, packed, strict=True):
            came = exchanges.carry(leaving, tables.receives, tables.sends, room=len(tables.order), most=tables.most)
            for place, part in zip(group, came.split([widths[place] for place in group], dim=1), strict=True):
                sum_replicas(sums[place], part, tables.begins, tables.order, tables.rounds)
        return with_sums(means, sums, tables.summed, world_size)

    return run


def segment_on_gpu(ranks: int) -> int:
    """Return the bytes of a chunk of each link among so many ranks."""
    return max(_SEGMENT, _SEGMENTS // ranks)


def piece_of(width: int, dtype: torch.dtype, segment: int) -> int:
    """Return how many numbers of ``dtype`` a piece of an expert of ``width`` has, with at most ``segment`` bytes.

    >>> piece_of(3 * 2048 * 768, torch.bfloat16, 2**22), piece_of(10_007, torch.float32, 2**20)
    (8192, 3336)

    They are the most that divide a whole expert, if that is not few; else about as many in each, and the last is not
    full. Pieces begin at multiples of 16 bytes, which kernels load at once.
    """
    most, step = max(1, min(_PIECE, segment) // dtype.itemsize), max(1, 16 // dtype.itemsize)
    if width <= most:
        return max(1, width)
    even = -(-width // -(-width // most))
    whole = (piece for piece in range(most - most % step, most // 4, -step) if width % piece == 0)
    return next(whole, -(-even // step) * step)


def _walk(steps: Iterator[object]) -> None:
    """Do all steps."""
    for _ in steps:
        pass


def _host_waits(device: torch.device) -> bool:
    """Tell whether the host waits for other ranks in an exchange; else kernels do, and the host goes on."""
    return device.type != "cuda" or not runs_on(device)
