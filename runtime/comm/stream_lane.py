"""A lane for collectives of NCCL: a CUDA stream beside that of the compute, launched by the thread that computes.

Memory belongs to streams as follows:

- Tensors that a job sends or returns are made before it is launched, on the compute's stream, which this one waits
  for. Whoever waits for the job goes on after its end, on the same stream: both may be freed there, and reused.
- Tensors that a job needs in between are made on this stream, and taken again by later jobs. A result that is made
  here is right as well: jobs begin after all work that the compute was given before.

No tensor is told about another stream (``record_stream``): its memory would be free only when all work has run that
the host had launched by then, and in a backward the host is many layers ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Launched:
    """A job on the stream, the compute's stream that started it, and its events, with times if it is ``timed``."""

    stream: Any
    timed: bool
    ended: Any = None
    times: dict[str, Any] = field(default_factory=dict)


class StreamLane:
    """Launches jobs one after the other; ``wait`` lets the host wait until a function that does not block is true."""

    def __init__(
        self, device: torch.device, *, wait: Callable[[Callable[[], bool]], None], cuda: Any = torch.cuda
    ) -> None:
        self._device, self._wait, self._cuda = device, wait, cuda
        # Its priority is above the compute's, so that a small collective need not wait until a large matmul has no
        # more blocks.
        self._stream = cuda.Stream(device, priority=-1)
        self._origin: Any = None
        self._began = 0.0
        # Events that are free for use again, without times and with them.
        self._free: dict[bool, list[Any]] = {False: [], True: []}
        self.timed = False

    def begin_step(self, *, dropped: bool, timed: bool) -> None:
        """Begin a step, from which times count; the compute may reuse memory of ``dropped`` jobs only after them."""
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
        """Let ``run`` put its work on the stream, after all work that the compute was given."""
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
        """Let the current stream go on after a job, and the host wait for it alone if it reads the result.

        Raises RuntimeError if the job was started on another stream, whose memory its result is.
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
        # The event may be recorded anew: a stream that waits for it waits for what it was when the wait was launched.
        self._free[False].append(ended)

    def times(self, launched: Launched) -> dict[str, float]:
        """Return when a job's events were, in seconds of ``time.perf_counter``; waits for them. Once for each job."""
        found = {}
        for name, event in launched.times.items():
            event.synchronize()
            found[name] = self._began + self._origin.elapsed_time(event) / 1e3
        self.forget(launched)
        return found

    def forget(self, launched: Launched) -> None:
        """Free the events of a job whose times will not be read."""
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
