"""A CUDA that only takes notes: of who waits for whom, of events, and of what is made on which stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hecate.runtime.comm.queue import CollectiveQueue
from hecate.runtime.comm.stream_lane import StreamLane

CPU = torch.device("cpu")


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for event on {event.stream}")


class Event:
    """Its time is how much had been noted when it was recorded."""

    def __init__(self, log: list[str], timed: bool) -> None:
        self.log, self.timed, self.stream, self.time = log, timed, "", 0

    def record(self, stream: Stream) -> None:
        self.stream, self.time = stream.name, len(self.log)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.log.append(f"host waits for event on {self.stream}")

    def elapsed_time(self, later: Event) -> float:
        assert self.timed and later.timed
        return 1e3 * (later.time - self.time)


class _Making(TorchDispatchMode):
    """Notes tensors of which the memory is new."""

    def __init__(self, made: list[torch.Tensor]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.made += [tensor for tensor in tensors_in(result) if memory_of(tensor) not in given]
        return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    """The same for tensors that share it, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


class Cuda:
    """What of ``torch.cuda`` a lane uses. The stream that is current can be changed.

    Attributes:
        events: all that were made.
        made: tensors whose memory is the lane's.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[Event] = []
        self.made: list[torch.Tensor] = []
        self.current = Stream("compute", self.log)
        self.capturing = False

    def Stream(self, device: Any, priority: int) -> Stream:
        assert priority < 0
        return Stream("lane", self.log)

    def Event(self, enable_timing: bool) -> Event:
        self.events.append(Event(self.log, enable_timing))
        return self.events[-1]

    def current_stream(self, device: Any) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        with _Making(self.made):
            yield
        self.current = before

    def queue(self) -> CollectiveQueue:
        """One with a lane on this."""

        def wait(ended: Any) -> None:
            self.log.append(f"host waits for event on {ended.__self__.stream}")

        return CollectiveQueue(CPU, lane=StreamLane(CPU, wait=wait, cuda=self))
