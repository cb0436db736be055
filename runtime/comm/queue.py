"""Collectives beside the compute: one queue per model, in which they run one after the other.

With gloo they run on a thread of the queue, with NCCL on a stream (``stream_lane``). One queue is one order, the same
on every rank, so no two ranks wait for different ones.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import merge
from queue import SimpleQueue
from typing import Any

import torch

from hecate.runtime.comm.history import doing, labelled
from hecate.runtime.comm.stream_lane import Launched, StreamLane


@dataclass(frozen=True)
class Job:
    """A collective that is ready to run, labelled in words that are the same on all ranks.

    ``run`` touches nothing but its own tensors, and returns tensors without other references, made before, unless
    they are the host's (``stream_lane`` says why). The host does ``meanwhile`` while it runs, then ``finish``, whose
    result is the collective's; it may read the result of ``run`` if that is ``on_host``.
    """

    queue: CollectiveQueue
    run: Callable[[], Any]
    meanwhile: Callable[[], None] | None = None
    finish: Callable[[Any], Any] | None = None
    on_host: bool = False
    label: str = ""

    def communicate(self) -> Any:
        """Run the job under its label, and return the result of ``run``."""
        with labelled(self.label):
            return self.run()


@dataclass
class Span:
    """Times of one collective, in seconds of ``time.perf_counter``; with NCCL of the GPU, once they are read.

    It was put into the queue (``started``), ran (``begun`` to ``ended``), and the compute stood still for it
    (``waited`` to ``ready``). ``behind`` is compute scheduled meanwhile; ``predicted_bytes`` leave this rank.
    """

    part: str
    operator: str
    subject: str
    predicted: float
    behind: float
    started: float
    begun: float = 0.0
    ended: float = 0.0
    waited: float = 0.0
    ready: float = 0.0
    predicted_bytes: float = 0.0

    @classmethod
    def of(cls, note: str) -> Span:
        """Return a span that starts now, from the note that the graph gave the collective (``collective_notes``)."""
        part, operator, subject, predicted, behind, sent = _read(note)
        return cls(part, operator, subject, predicted, behind, time.perf_counter(), predicted_bytes=sent)

    @property
    def title(self) -> str:
        """Name of the collective, for people."""
        return f"{self.part} {self.operator} of {self.subject}" if self.part != "-" else "a collective"

    @property
    def seconds(self) -> float:
        """Seconds for which it ran."""
        return self.ended - self.begun

    @property
    def exposed(self) -> float:
        """Seconds for which the compute stood still for it."""
        return self.ready - self.waited


@lru_cache(maxsize=4096)
def _read(note: str) -> tuple[str, str, str, float, float, float]:
    """Return the parts of a note; a graph gives the same notes in every step."""
    part, operator, predicted, behind, sent, subject = note.split(" ", 5)
    return part, operator, subject, float(predicted), float(behind), float(sent)


class _Latch:
    """A latch that is opened once; like :class:`threading.Event`, without the lock around its lock."""

    def __init__(self) -> None:
        self._shut = threading.Lock()
        self._shut.acquire()

    def open(self) -> None:
        self._shut.release()

    @property
    def is_open(self) -> bool:
        """Tell the thread that waits whether it is open; while another thread waits, it may seem shut."""
        return not self._shut.locked()

    def wait(self) -> None:
        """Return when it is open."""
        with self._shut:
            pass


@dataclass(eq=False)
class _Pending:
    """A job under way. Its tensors are let go as soon as it is waited for."""

    job: Job | None
    span: Span
    queue: CollectiveQueue
    # Inference mode belongs to the thread that starts the job, as do the tensors that are made in it.
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    done: _Latch = field(default_factory=_Latch)
    result: Any = None
    error: BaseException | None = None
    stream: Any = None
    launched: Launched | None = None

    def run(self) -> None:
        self.span.begun = time.perf_counter()
        try:
            assert self.job is not None
            with torch.inference_mode(self.inference), torch.no_grad(), doing(self.span.title):
                self.result = self.job.communicate()
        except BaseException as error:
            self.error = error
        finally:
            self.span.ended = time.perf_counter()
            self.done.open()

    def wait(self) -> Any:
        self.span.waited = time.perf_counter()
        job = self.job
        assert job is not None
        try:
            if job.meanwhile is not None:
                job.meanwhile()
        except BaseException as error:
            # Tensors that are being sent are still read: wait as if the job itself had failed.
            self.error = error
        # This wait ends: the thread runs jobs in order, and each ends with its collective or with that one's timeout.
        self.done.wait()
        result, self.result, self.job = self.result, None, None
        # Tensors that it packed may be read until it ends, also if something failed.
        self.queue.hand_over(self, job)
        if self.error is not None:
            raise self.error
        self.span.ready = time.perf_counter()
        return result if job.finish is None else job.finish(result)


# Spans that a queue remembers.
_KEPT = 4096
# The first steps have times although no reader has asked for them, so that there is something to show; some of them
# compile.
_FIRST = 5
# The note of a collective in one piece, which has none from a graph.
_UNLABELLED = "- - 0 0 0 -"
# Jobs are kept by their queue, so they go with their model.
_pending: weakref.WeakValueDictionary[int, _Pending] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class CollectiveQueue:
    """Runs jobs in the order in which they are started, on a thread, or on the CUDA stream of ``lane``.

    The queues of a model stand ``beside`` one of them, which begins steps and is drained for all.
    """

    def __init__(
        self, device: torch.device, *, lane: StreamLane | None = None, beside: CollectiveQueue | None = None
    ) -> None:
        self.device = device
        self._others: list[CollectiveQueue] = []
        if beside is not None:
            beside._others.append(self)
        self._spans: deque[Span] = deque(maxlen=_KEPT)
        # Spans whose times the GPU knows and the host has not read yet.
        self._unread: deque[tuple[Span, Launched]] = deque(maxlen=_KEPT)
        self._lane, self._asked = lane, _FIRST
        self._inbox: SimpleQueue[_Pending | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Pending | None = None
        self._started: dict[int, _Pending] = {}

    @property
    def spans(self) -> list[Span]:
        """Spans of the last step's collectives; with NCCL of the last step that has times, which the host awaits."""
        while self._lane is not None and self._unread:
            span, launched = self._unread.popleft()
            for name, seconds in self._lane.times(launched).items():
                setattr(span, name, seconds)
        return list(merge(self._spans, *(other.spans for other in self._others), key=lambda span: span.started))

    def ask_for_times(self) -> None:
        """Take times in the next step, for a reader. On a stream the host pays for them, so few steps have any."""
        for queue in (self, *self._others):
            queue._asked = max(queue._asked, 1)

    @property
    def on_stream(self) -> bool:
        """Tell whether jobs run on a CUDA stream."""
        return self._lane is not None

    @property
    def idle(self) -> bool:
        """Tell whether no job is under way, as far as the host knows."""
        return self._lane is None and (self._last is None or self._last.done.is_open)

    def drain(self) -> None:
        """Wait until no job is under way on the thread."""
        for queue in (self, *self._others):
            if queue._last is not None:
                queue._last.done.wait()

    def begin_step(self) -> None:
        """Forget the last step's spans, and jobs that a graph started and, because it failed, never waited for."""
        self.drain()
        if self._lane is not None:
            self._lane.begin_step(dropped=bool(self._started), timed=self._asked > 0)
        self._started.clear()
        if self._is_timed:
            self._asked = max(0, self._asked - 1)
            self._forget_spans()
        for other in self._others:
            other.begin_step()

    def forget_spans(self) -> None:
        """Forget the spans so far: what runs next is not part of their step."""
        for queue in (self, *self._others):
            queue._forget_spans()

    def _forget_spans(self) -> None:
        if self._lane is not None:
            for _, launched in self._unread:
                self._lane.forget(launched)
        self._spans.clear()
        self._unread.clear()

    @property
    def _is_timed(self) -> bool:
        return self._lane is None or self._lane.timed

    def submit(self, job: Job, note: str) -> _Pending:
        """Put ``job`` at the end of the queue."""
        pending = _Pending(job, Span.of(note or _UNLABELLED), self)
        remembered = bool(note) and self._is_timed
        if remembered:
            self._spans.append(pending.span)
        if self._lane is not None:
            pending.launched = self._lane.launch(pending.run, timed=remembered)
            if remembered:
                self._unread.append((pending.span, pending.launched))
            return pending
        if self.device.type != "cpu":
            # For copies through the host, which belong to the compute's stream, as they would without a thread.
            pending.stream = torch.accelerator.current_stream(self.device)
        if self._thread is None:
            # A daemon, so that a rank that fails can exit although its peers never come.
            self._thread = threading.Thread(target=_work, args=(self._inbox,), name="hecate-collectives", daemon=True)
            self._thread.start()
            # The thread holds nothing but the inbox: when the queue goes, it is told to end, but not when the
            # interpreter ends, since jobs that are submitted then must still run.
            weakref.finalize(self, self._inbox.put, None).atexit = False
        self._last = pending
        self._inbox.put(pending)
        return pending

    def hand_over(self, pending: _Pending, job: Job) -> None:
        """Let later work use, and free, the tensors that a job on a stream has sent and returns."""
        if self._lane is not None:
            assert pending.launched is not None
            with labelled(job.label), doing(pending.span.title):
                self._lane.hand_over(pending.launched, on_host=job.on_host and pending.error is None)


def _work(inbox: SimpleQueue[_Pending | None]) -> None:
    while (pending := inbox.get()) is not None:
        with pending.stream or nullcontext():
            pending.run()
        # A pending job refers to its queue, which must not live on because this thread waits for the next job.
        del pending


def start(job: Job, note: str) -> int:
    """Start ``job`` in its queue, and return its number for :func:`wait`."""
    number = next(_numbers)
    _pending[number] = job.queue._started[number] = job.queue.submit(job, note)
    return number


def wait(number: int) -> Any:
    """Return the result of the job that :func:`start` gave this number to; only once."""
    pending = _pending.pop(number)
    del pending.queue._started[number]
    return pending.wait()


def run(job: Job) -> Any:
    """Start ``job`` and wait for it: in the caller's thread if its queue is idle; on a stream after the others."""
    if not job.queue.idle:
        return job.queue.submit(job, "").wait()
    result = job.communicate()
    if job.meanwhile is not None:
        job.meanwhile()
    return result if job.finish is None else job.finish(result)
