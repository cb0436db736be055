"""Collectives on a CUDA stream: who waits for whom, told by a CUDA that only takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hecate.runtime.comm import queue
from hecate.runtime.comm.queue import CollectiveQueue, Job
from hecate.runtime.comm.stream_lane import StreamLane

NOTE = "forward something 0.25 1.5 64 a layer"


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for event on {event.stream}")


class Event:
    """Its time is how much had been noted when it was recorded."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.stream, self.time = log, "", 0

    def record(self, stream: Stream) -> None:
        self.stream, self.time = stream.name, len(self.log)

    def synchronize(self) -> None:
        self.log.append(f"host waits for event on {self.stream}")

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.time - self.time)


class Cuda:
    """What of ``torch.cuda`` a lane uses. The stream that is current can be changed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream("compute", self.log)
        self.capturing = False

    def Stream(self, device: Any, priority: int) -> Stream:
        assert priority < 0
        return Stream("lane", self.log)

    def Event(self, enable_timing: bool) -> Event:
        return Event(self.log)

    def current_stream(self, device: Any) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


def make(cuda: Cuda) -> CollectiveQueue:
    device = torch.device("cpu")
    return CollectiveQueue(device, lane=StreamLane(device, cuda=cuda))


def job(own: CollectiveQueue, cuda: Cuda, name: str, **options: Any) -> Job:
    def run() -> torch.Tensor:
        cuda.log.append(f"{name} on {cuda.current.name}")
        return torch.ones(1)

    return Job(own, run, **options)


def test_a_job_runs_behind_the_compute_and_the_compute_behind_the_job(cuda: Cuda) -> None:
    own = make(cuda)
    number = queue.start(job(own, cuda, "all-to-all"), NOTE)
    assert cuda.log == ["lane waits for compute", "all-to-all on lane"]
    queue.wait(number)
    assert cuda.log[2:] == ["compute waits for event on lane"], "and the host waits for nothing"


def test_the_host_waits_for_what_it_reads_and_only_for_that(cuda: Cuda) -> None:
    own, read = make(cuda), []
    number = queue.start(job(own, cuda, "counts", on_host=True, finish=lambda _: read.append(len(cuda.log))), NOTE)
    queue.start(job(own, cuda, "experts"), NOTE)
    queue.wait(number)
    assert cuda.log[-1] == "host waits for event on lane"
    assert read == [len(cuda.log)], "read behind the wait"


def test_what_is_not_split_runs_on_the_same_stream(cuda: Cuda) -> None:
    """One communicator, one stream."""
    own = make(cuda)
    queue.run(job(own, cuda, "whole"))
    assert "whole on lane" in cuda.log and cuda.log[-1] == "compute waits for event on lane"


def test_memory_of_the_stream_that_started_a_job_is_kept_until_its_end(cuda: Cuda) -> None:
    """Packed tensors are of the stream that was current at the start; they are freed when the job is waited for."""
    own = make(cuda)
    number = queue.start(job(own, cuda, "all-to-all"), NOTE)
    cuda.current = Stream("side", cuda.log)
    queue.wait(number)
    assert set(cuda.log[-2:]) == {"compute waits for event on lane", "side waits for event on lane"}


class Result(torch.Tensor):
    """Looks as if it were on a GPU, and notes who uses it."""

    is_cuda = True
    used_on: list[str]

    def record_stream(self, stream: Any) -> None:
        self.used_on.append(stream.name)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_result_is_told_who_uses_it_unless_a_graph_is_captured(cuda: Cuda, capturing: bool) -> None:
    """In a capture it would keep its memory until the end."""
    own, result = make(cuda), torch.ones(1).as_subclass(Result)
    result.used_on, cuda.capturing = [], capturing
    queue.wait(queue.start(Job(own, lambda: result), NOTE))
    assert result.used_on == ([] if capturing else ["compute"])


def test_a_step_waits_for_what_the_one_before_dropped(cuda: Cuda) -> None:
    own = make(cuda)
    queue.start(job(own, cuda, "dropped"), NOTE)
    own.begin_step()
    assert cuda.log[-1] == "compute waits for lane"
    noted = len(cuda.log)
    own.begin_step()
    assert len(cuda.log) == noted, "nothing was dropped"


def test_spans_have_the_times_of_the_device(cuda: Cuda) -> None:
    own = make(cuda)
    own.begin_step()
    number = queue.start(job(own, cuda, "all-to-all"), NOTE)
    queue.start(job(own, cuda, "another"), NOTE)
    queue.wait(number)
    span = own.spans[0]
    assert span.begun - span.started == pytest.approx(1), "the lane waited for the compute first"
    assert span.ended - span.begun == pytest.approx(1), "only its own work lies between"
    assert span.waited - span.ended == pytest.approx(2), "the other job's"
    assert span.ready - span.waited == pytest.approx(1)
    noted = len(cuda.log)
    assert own.spans[0].begun == span.begun and len(cuda.log) == noted, "read once"


def test_an_error_comes_out_at_the_wait(cuda: Cuda) -> None:
    own = make(cuda)

    def fail() -> None:
        raise ValueError("no")

    number = queue.start(Job(own, fail), NOTE)
    with pytest.raises(ValueError, match="no"):
        queue.wait(number)
