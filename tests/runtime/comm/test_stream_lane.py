"""Collectives on a CUDA stream: who waits for whom, told by a CUDA that only takes notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hecate.runtime.comm import queue
from hecate.runtime.comm.queue import CollectiveQueue, Job
from tests.support.fake_cuda import Cuda, Stream

NOTE = "forward something 0.25 1.5 64 a layer"


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


def job(own: CollectiveQueue, cuda: Cuda, name: str, **options: Any) -> Job:
    def run() -> torch.Tensor:
        cuda.log.append(f"{name} on {cuda.current.name}")
        return torch.ones(1)

    return Job(own, run, **options)


def test_a_job_runs_behind_the_compute_and_the_compute_behind_the_job(cuda: Cuda) -> None:
    own = cuda.queue()
    number = queue.start(job(own, cuda, "all-to-all"), NOTE)
    assert cuda.log == ["lane waits for compute", "all-to-all on lane"]
    queue.wait(number)
    assert cuda.log[2:] == ["compute waits for event on lane"], "and the host waits for nothing"


def test_the_host_waits_for_what_it_reads_and_only_for_that(cuda: Cuda) -> None:
    own, read = cuda.queue(), []
    number = queue.start(job(own, cuda, "counts", on_host=True, finish=lambda _: read.append(len(cuda.log))), NOTE)
    queue.start(job(own, cuda, "experts"), NOTE)
    queue.wait(number)
    assert cuda.log[-1] == "host waits for event on lane"
    assert read == [len(cuda.log)], "read behind the wait"


def test_what_is_not_split_runs_on_the_same_stream(cuda: Cuda) -> None:
    """One communicator, one stream."""
    own = cuda.queue()
    queue.run(job(own, cuda, "whole"))
    assert "whole on lane" in cuda.log and cuda.log[-1] == "compute waits for event on lane"


def test_a_job_is_waited_for_on_the_stream_that_started_it(cuda: Cuda) -> None:
    """What it sends and returns is memory of that stream, and nobody tells the other one's readers."""
    own = cuda.queue()
    number = queue.start(job(own, cuda, "all-to-all"), NOTE)
    cuda.current = Stream("side", cuda.log)
    with pytest.raises(RuntimeError, match="started on one CUDA stream, and is waited for on another"):
        queue.wait(number)


class Result(torch.Tensor):
    """Looks as if it were on a GPU, and must not be told who uses it."""

    is_cuda = True

    def record_stream(self, stream: Any) -> None:
        raise AssertionError("its memory would be kept until all has run that the host has launched")


def test_memory_of_a_result_is_free_as_soon_as_nobody_has_it(cuda: Cuda) -> None:
    own, result = cuda.queue(), torch.ones(1).as_subclass(Result)
    assert queue.wait(queue.start(Job(own, lambda: result), NOTE)) is result


def test_a_step_waits_for_what_the_one_before_dropped(cuda: Cuda) -> None:
    own = cuda.queue()
    queue.start(job(own, cuda, "dropped"), NOTE)
    own.begin_step()
    assert cuda.log[-1] == "compute waits for lane"
    noted = len(cuda.log)
    own.begin_step()
    assert len(cuda.log) == noted, "nothing was dropped"


def test_spans_have_the_times_of_the_device(cuda: Cuda) -> None:
    own = cuda.queue()
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


def test_events_are_used_again_and_without_readers_have_no_times(cuda: Cuda) -> None:
    own = cuda.queue()

    def step() -> None:
        own.begin_step()
        for _ in range(10):
            numbers = [queue.start(job(own, cuda, "all-to-all"), NOTE) for _ in range(3)]
            for number in numbers:
                queue.wait(number)

    # The first steps have times, for whoever reads them in the end.
    for _ in range(5):
        step()
    first = own.spans[0]
    assert len(own.spans) == 30 and first.ended > first.begun
    made = len(cuda.events)
    assert made <= 3 + 30 * 5 + 1, "three at once, thirty with times, and where times count from"
    for event in cuda.events:
        event.time = -1
    for _ in range(4):
        step()
    assert len(cuda.events) == made, "a hundred jobs and more, with the events of those before"
    assert all(event.time == -1 for event in cuda.events if event.timed), "and without times"
    assert own.spans[0] is first, "those that have times are kept"
    own.ask_for_times()
    step()
    assert own.spans[0] is not first and own.spans[0].ended > own.spans[0].begun
    step()
    assert sum(event.timed for event in cuda.events) <= 30 * 5 + 1


def test_a_capture_has_no_times(cuda: Cuda) -> None:
    own, cuda.capturing = cuda.queue(), True
    own.begin_step()
    queue.wait(queue.start(job(own, cuda, "all-to-all"), NOTE))
    assert not own.spans and not any(event.timed for event in cuda.events)
