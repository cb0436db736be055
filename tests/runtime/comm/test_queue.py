"""The queue of collectives: in order, beside the caller, and every wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hecate.runtime.comm import queue
from hecate.runtime.comm.queue import CollectiveQueue, Job

NOTE = "forward something 0.25 1.5 64 a layer"


def make() -> CollectiveQueue:
    return CollectiveQueue(torch.device("cpu"))


def test_jobs_run_in_order_beside_the_caller() -> None:
    own, order, release = make(), [], threading.Event()

    def first() -> int:
        release.wait(10)
        order.append((1, threading.current_thread().name))
        return 1

    def second() -> int:
        order.append((2, threading.current_thread().name))
        return 2

    numbers = [queue.start(Job(own, work), NOTE) for work in (first, second)]
    assert not own.idle and order == []
    release.set()
    assert [queue.wait(number) for number in reversed(numbers)] == [2, 1]
    assert order == [(1, "hecate-collectives"), (2, "hecate-collectives")]
    assert own.idle


def test_what_nobody_split_runs_behind_what_is_on_its_way() -> None:
    own, order = make(), []
    number = queue.start(Job(own, lambda: order.append("started")), NOTE)
    queue.run(Job(own, lambda: order.append("whole"), finish=lambda _: order.append("finished")))
    assert order == ["started", "whole", "finished"]
    queue.wait(number)
    queue.run(Job(own, lambda: order.append(threading.current_thread() is threading.main_thread())))
    assert order[-1] is True, "an idle queue needs no thread"


def test_the_host_works_meanwhile_and_finishes() -> None:
    own, order, release = make(), [], threading.Event()

    def run() -> int:
        release.wait(10)
        order.append("run")
        return 20

    def meanwhile() -> None:
        order.append("meanwhile")
        release.set()

    assert queue.wait(queue.start(Job(own, run, meanwhile, lambda result: result + 1), NOTE)) == 21
    assert order == ["meanwhile", "run"]


def test_a_failure_of_the_host_is_raised_behind_the_job() -> None:
    own, order = make(), []

    def run() -> None:
        time.sleep(0.2)
        order.append("run")

    def meanwhile() -> None:
        raise ValueError("no such rank")

    with pytest.raises(ValueError, match="no such rank"):
        queue.wait(queue.start(Job(own, run, meanwhile), NOTE))
    assert order == ["run"], "what it sends is read no longer"
    assert queue.run(Job(own, lambda: 3)) == 3


def test_a_failure_is_raised_where_it_is_waited_for_and_the_next_job_runs() -> None:
    own = make()

    def fail() -> None:
        raise ConnectionError("peer went away")

    failing, working = queue.start(Job(own, fail), NOTE), queue.start(Job(own, lambda: 5), NOTE)
    with pytest.raises(ConnectionError, match="peer went away"):
        queue.wait(failing)
    assert queue.wait(working) == 5


def test_a_new_step_forgets_what_a_failed_one_left() -> None:
    own, other = make(), make()
    left, kept = queue.start(Job(own, lambda: 1), NOTE), queue.start(Job(other, lambda: 2), NOTE)
    own.begin_step()
    assert not own.spans
    with pytest.raises(KeyError):
        queue.wait(left)
    assert queue.wait(kept) == 2, "another model's"


def test_spans_say_what_was_predicted_and_measured() -> None:
    own = make()
    queue.wait(queue.start(Job(own, lambda: None), NOTE))
    (span,) = own.spans
    assert (span.part, span.operator, span.subject) == ("forward", "something", "a layer")
    assert (span.predicted, span.behind, span.predicted_bytes) == (0.25, 1.5, 64)
    assert 0 <= span.seconds <= span.ready - span.started


def test_the_thread_works_on_the_stream_of_the_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a device that is not CUDA's."""
    entered = []

    @contextmanager
    def stream() -> Iterator[None]:
        entered.append(threading.current_thread().name)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream())
    own = CollectiveQueue(torch.device("xpu", 0))
    assert queue.wait(queue.start(Job(own, lambda: list(entered)), NOTE)) == ["hecate-collectives"]
    own.drain()
