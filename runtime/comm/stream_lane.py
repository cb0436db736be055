"""Where collectives of NCCL run: on a CUDA stream beside that of the compute, launched by the thread that computes.

Whose memory is whose:

- What a job sends, and what it returns, is made before it is launched, on the stream of the compute, which this
  stream then waits for. Whoever waits for the job goes on behind its end, on the same stream. So both may be freed
  there like anything else that is computed, and are taken again at once.
- What a job needs in between is made on this stream, and taken again by the jobs behind it. Should a result be made
  here, then it is so, too: jobs begin behind all that the compute was told before.

No tensor is told about another stream (``record_stream``): what is told so is taken again only when all has run that
the host had launched when it was freed, and in a backward the host is many layers ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Launched:
    """One job on the stream.

    Attributes:
        stream: of the compute that started it.
        timed: somebody will read its times.
        ended: is recorded behind it.
        times: events with times: the start on the stream of the compute, begin and end of the job, and before and
            after the wait for it.
    """

    stream: Any
    timed: bool
    ended: Any = None
    times: dict[str, Any] = field(default_factory=dict)


class StreamLane:
    """Launches jobs one after the other.

    Args:
        device: whose stream it is.
        wait: lets the host wait until what it is given, which does not block, says that it may go on.
        cuda: ``torch.cuda``.

    Attributes:
        timed: whether jobs of this step can have times.
    """

    def __init__(
        self, device: torch.device, *, wait: Callable[[Callable[[], bool]], None], cuda: Any = torch.cuda
    ) -> None:
        self._device, self._wait, self._cuda = device, wait, cuda
        # Above the compute, so that a small collective need not wait until a large matmul has no more blocks.
        self._stream = cuda.Stream(device, priority=-1)
        self._origin: Any = None
        self._began = 0.0
        # Events that nothing waits for any more, without times and with them.
        self._free: dict[bool, list[Any]] = {False: [], True: []}
        self.timed = False

    def begin_step(self, *, dropped: bool, timed: bool) -> None:
        """Times count from here.

        Args:
            dropped: jobs were started that nobody will wait for. The compute may reuse their memory only behind them.
            timed: somebody wants to know the times of this step's jobs.
        """
        current = self._cuda.current_stream(self._device)
        if dropped:
            current.wait_stream(self._stream)
        # Events of a capture have no times.
        self.timed = timed and not self._cuda.is_current_stream_capturing()
        if self.timed:
            if self._origin is None:
                self._origin = self._cuda.Event(enable_timing=True)
            self._origin.record(current)
            self._began = time.perf_counter()

    def launch(self, run: Callable[[], None], *, timed: bool) -> Launched:
        """Let ``run`` put its work on the stream, behind what the compute has been told to do."""
        current = self._cuda.current_stream(self._device)
        launched = Launched(current, timed)
        self._note(launched, "started", current)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            self._note(launched, "begun", self._stream)
            run()
            self._note(launched, "ended", self._stream)
            launched.ended = self._record(self._stream, timed=False)
        return launched

    def hand_over(self, launched: Launched, *, on_host: bool) -> None:
        """Let the stream that is current go on behind a job.

        Args:
            on_host: the host reads its result, so the host waits, for this job and nothing else.

        Raises:
            RuntimeError: the job was started on another stream, whose memory its result is.
        """
        current, ended = self._cuda.current_stream(self._device), launched.ended
        if current != launched.stream:
            raise RuntimeError(
                "hecate: a collective was started on one CUDA stream, and is waited for on another. Run a compiled "
                "model's forward, and its backward, on one stream each"
            )
        self._note(launched, "waited", current)
        current.wait_event(ended)
        self._note(launched, "ready", current)
        if on_host:
            self._wait(ended.query)
        # It may be recorded anew: who waits for it waits for what it was.
        self._free[False].append(ended)

    def times(self, launched: Launched) -> dict[str, float]:
        """When its events were, in seconds of ``time.perf_counter``; waits for them. Once for each job."""
        found = {}
        for name, event in launched.times.items():
            event.synchronize()
            found[name] = self._began + self._origin.elapsed_time(event) / 1e3
        self.forget(launched)
        return found

    def forget(self, launched: Launched) -> None:
        """Nobody will read its times."""
        self._free[True].extend(launched.times.values())
        launched.times.clear()

    def _note(self, launched: Launched, name: str, stream: Any) -> None:
        if launched.timed:
            launched.times[name] = self._record(stream, timed=True)

    def _record(self, stream: Any, *, timed: bool) -> Any:
        free = self._free[timed]
        event = free.pop() if free else self._cuda.Event(enable_timing=timed)
        event.record(stream)
        return event
