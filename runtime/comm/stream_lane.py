"""Where collectives of NCCL run: on a CUDA stream beside that of the compute, launched by the thread that computes.

Three things keep memory right. A start packs what travels on the stream of the compute, which this stream waits for.
The stream that a job was started on, and the one that waits for it, go on behind its end, so what it packed may be
freed then. Results are made on this stream, and are told which stream uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Launched:
    """One job on the stream.

    Attributes:
        stream: of the compute that started it.
        events: with times: the start on the stream of the compute, begin and end of the job, and on the stream that
            waits for it before and after the wait.
    """

    stream: Any
    events: dict[str, Any] = field(default_factory=dict)


class StreamLane:
    """Launches jobs one after the other.

    Args:
        device: whose stream it is.
        cuda: ``torch.cuda``.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        # Above the compute, so that a small collective need not wait until a large matmul has no more blocks.
        self._stream = cuda.Stream(device, priority=-1)
        self._origin: Any = None
        self._began = 0.0

    def begin_step(self, *, dropped: bool) -> None:
        """Times count from here.

        Args:
            dropped: jobs were started that nobody will wait for. The compute may reuse their memory only behind them.
        """
        current = self._cuda.current_stream(self._device)
        if dropped:
            current.wait_stream(self._stream)
        self._origin, self._began = self._record(current), time.perf_counter()

    def launch(self, run: Callable[[], None]) -> Launched:
        """Let ``run`` put its work on the stream, behind what the compute has been told to do."""
        current = self._cuda.current_stream(self._device)
        launched = Launched(current)
        launched.events["started"] = self._record(current)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            launched.events["begun"] = self._record(self._stream)
            run()
            launched.events["ended"] = self._record(self._stream)
        return launched

    def hand_over(self, launched: Launched, result: Any, *, on_host: bool) -> None:
        """Make a result safe to use, and to free.

        Args:
            on_host: the host reads it, so the host waits, for this job and nothing else.
        """
        current, ended = self._cuda.current_stream(self._device), launched.events["ended"]
        launched.events["waited"] = self._record(current)
        for stream in {launched.stream, current}:
            stream.wait_event(ended)
        launched.events["ready"] = self._record(current)
        if on_host:
            ended.synchronize()
        if self._cuda.is_current_stream_capturing():
            # In a capture it would keep the memory until the end. What is freed is taken again in a later job, which
            # begins behind all that the compute has been told by then.
            return
        for tensor in _tensors(result):
            if tensor.is_cuda:
                tensor.record_stream(current)

    def times(self, launched: Launched) -> dict[str, float]:
        """When its events were, in seconds of ``time.perf_counter``; waits for them. None before the first step."""
        if self._origin is None:
            return {}
        found = {}
        for name, event in launched.events.items():
            event.synchronize()
            found[name] = self._began + self._origin.elapsed_time(event) / 1e3
        return found

    def _record(self, stream: Any) -> Any:
        event: Any = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def _tensors(result: Any) -> Iterable[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else result
