"""Exchanges as writes into other ranks' memory, of sizes that the host need not know.

From each rank to each leads a link (``links``): a ring of a few places in the reader's window (``windows``). Of both
links between two ranks chunk n goes at the same time. For it a rank does, one launch after the other on one stream:

| step | what it does |
|---|---|
| put | writes rows into the readers' windows, at place ``n % 2`` |
| signal | posts (n, rows of the link) on the readers' boards, with release |
| wait | waits until those ranks have signalled chunk n, with acquire, and reads how many rows come |
| take | copies rows out of its own window |

**A chunk is read as it was written.** A word has one writer, and numbers on it only grow. A reader takes chunk n
after the source's signal n, which is posted after the rows. The next chunk at that place is n + 2; its source puts it
after its wait for the reader's signal n + 1, which the reader posts after its take of chunk n. So no row is read
before it is written, and no unread row is written over, in whatever order memory becomes visible.

**More rows than fit.** A signal tells all rows of its link. After the first wait both ranks know how many chunks the
links between them have: at least one, and as many as the longer one begins of ``capacity`` rows each. Ranks need not
agree on how many chunks they go through.

**Nobody waits for ever.** Order the steps of all ranks by exchange, chunk, and the table above. Only wait waits, for
signals of the same chunk, which are above it: of all steps that are left the smallest can run. No launch for which
others wait comes after a wait, so this holds for ranks on streams of one GPU, too. If a rank does not come, a wait
ends after some time: that rank is late, nothing is written to it or read from it from then on, and
:meth:`Transport.check` names it.

Ranks reach each other's memory over NVLink, which has not been tried (docs/gpu.md), or are on one GPU, or are
processes of one machine's CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hecate.runtime.comm import collectives
from hecate.runtime.one_sided.links import COUNT_BITS, Chunk, Rows, capacity_of, row_bytes
from hecate.runtime.one_sided.post_words import post_words
from hecate.runtime.one_sided.put_rows import put_rows
from hecate.runtime.one_sided.take_rows import take_rows
from hecate.runtime.one_sided.wait_words import Stop, has_come, wait_words
from hecate.runtime.one_sided.windows import Windows
from hecate.runtime.state.settle import ExchangeFailed


class Transport:
    """A rank's end of all links; a rank whose word does not come within ``seconds`` is late.

    All ranks begin the same exchanges in the same order on one stream. ``windows`` are for this transport alone.
    """

    def __init__(self, windows: Windows, *, seconds: float) -> None:
        self.windows, self._seconds = windows, seconds
        zeros = torch.zeros((3, windows.size), dtype=torch.int64, device=windows.device)
        self._told, self._late, self._exceeded = zeros.unbind()
        # Whether each rank came too late, and how many rows were left behind or not expected, int64 [2, W]: all zero
        # if all is well. Read by the host, or copied to it beside other numbers.
        self.faults = zeros[1:]
        everything = (windows.data, windows.signals)
        pointers = torch.tensor([[part.data_ptr() for part in parts] for parts in everything], device="cpu")
        self._data, self._signals = pointers.to(windows.device).unbind()

    def steps(
        self,
        leaving: Rows,
        sends: Tensor,
        arriving: Rows,
        *,
        most: int,
        wire: torch.dtype,
        expects: Tensor | None = None,
        stop: Stop | None = None,
    ) -> Iterator[tuple[str, Chunk]]:
        """Bring rows to other ranks, and theirs to their places here; yields each step and its chunk, then does it.

        An exchange is all of its steps, one after the other; the caller may do other work between them.

        Args:
            leaving, arriving: this rank's rows, and room for those that come, in places rank by rank.
            sends: how many go to each rank, int64 ``[W]`` on the device.
            most: rows that no link has more of. More than needed only costs launches.
            wire: the dtype that travels.
            expects: how many should come from each rank, int64 ``[W]`` on the device, where that is known: a
                difference is a fault, for a rank may have left out an exchange.
            stop: asked where the host waits; as soon as it is true, ranks that have not come are late.

        Raises:
            ValueError: leaving and arriving rows have different lengths, a row is longer than a segment of the
                window, or ``most`` is more than words can tell.
        """
        windows, rank = self.windows, self.windows.rank
        capacity, size = capacity_of(windows.data[rank], leaving.tensor, wire), row_bytes(leaving.tensor, wire)
        if size != row_bytes(arriving.tensor, wire):
            raise ValueError(f"hecate: rows {list(leaving.tensor.shape)} leave, {list(arriving.tensor.shape)} arrive")
        if capacity == 0:
            raise ValueError(f"hecate: a row of {size} bytes does not fit into segments of {windows.segment}")
        if most >= 1 << COUNT_BITS:
            raise ValueError(f"hecate: {most} rows from one rank to another, at most {(1 << COUNT_BITS) - 1} can go")
        receives = torch.zeros_like(sends)
        for first in range(0, max(1, most), capacity):
            chunk = Chunk(sends, receives, self._told, self._late, first)
            yield "put", chunk
            put_rows(leaving, chunk, windows.data, self._data, rank, wire)
            yield "signal", chunk
            post_words(chunk, windows.signals, self._signals, rank)
            yield "wait", chunk
            wait_words(windows.signals[rank], chunk, seconds=self._seconds, stop=stop)
            yield "take", chunk
            take_rows(windows.data[rank], arriving, chunk, wire)
        # Rows that were left behind, if any: here, at the other rank, and of a link.
        behind = torch.maximum(sends.sum() - leaving.count, receives.sum() - arriving.count)
        behind = torch.maximum(behind, torch.maximum(sends, receives) - most)
        if expects is not None:
            behind = torch.maximum(behind, (receives - expects).abs() * (self._late == 0))
        self._exceeded.copy_(torch.maximum(self._exceeded, behind))

    def missing(self, step: str, chunk: Chunk) -> list[int]:
        """Return the ranks for which a step that :meth:`steps` is about to do would wait. Waits for the device."""
        if step != "wait":
            return []
        came = has_come(self.windows.signals[self.windows.rank], chunk)
        return torch.nonzero(chunk.links & ~came).flatten().tolist()

    def check(self, faults: Tensor | None = None) -> None:
        """Raise ExchangeFailed unless all rows of all exchanges so far have come.

        Without ``faults``, a copy of :attr:`faults` on the host, this waits for the device.
        """
        late, exceeded = (self.faults if faults is None else faults).tolist()
        if any(late):
            ranks = [rank for rank, is_late in enumerate(late) if is_late]
            raise ExchangeFailed(f"hecate: rank {self.windows.rank} waited in vain for ranks {ranks}")
        if max(exceeded) > 0:
            raise ExchangeFailed(
                f"hecate: rank {self.windows.rank} had {max(exceeded)} rows more, or fewer, than it was told of: "
                "ranks are in different exchanges"
            )


@dataclass(frozen=True, eq=False)
class Message:
    """Numbers on their way to the host, after the transport's faults; ``there`` is an event, or None if they came."""

    copy: Tensor
    shape: torch.Size
    there: Any
    tell: Callable[[Tensor], None]


@dataclass(eq=False)
class LateNews:
    """Numbers that the device has and the host learns later, in the order in which they were sent."""

    transport: Transport
    messages: list[Message] = field(default_factory=list, repr=False)

    def send(self, numbers: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Copy int64 ``numbers`` to the host, which does not wait, and call ``tell`` with them when it reads."""
        message = torch.cat([self.transport.faults.flatten(), numbers.flatten()])
        there: Any = None
        copy = collectives.on_host(message)
        if message.is_cuda:
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(message.device))
        self.messages.append(Message(copy, numbers.shape, there, tell))

    def take(self) -> list[Message]:
        """Return the messages so far, and forget them; each replay sends its own anew (:meth:`send_again`)."""
        messages, self.messages = self.messages, []
        return messages

    def send_again(self, messages: list[Message], there: Any) -> None:
        """Send messages again, which have come at the event ``there``, or have come already if it is None."""
        self.messages = [replace(one, there=there) for one in messages]

    def read(self) -> None:
        """Wait for all messages, and pass them on.

        Raises ExchangeFailed if rows did not come, or had no room; later messages, computed from NaN, are forgotten
        then.
        """
        faults = self.transport.faults
        for one in self.take():
            if one.there is not None:
                one.there.synchronize()
            self.transport.check(one.copy[: faults.numel()].view(faults.shape))
            one.tell(one.copy[faults.numel() :].view(one.shape))
