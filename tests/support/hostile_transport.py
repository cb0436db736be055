"""A transport that makes races visible: collectives run late, and memory that was let go of turns into NaN.

A start may let go of its arguments when it returns: a compiler may reuse their memory at once. So it gets copies of
them, which are overwritten as soon as it returns. What a collective sends from is let go of when it has run, and
overwritten then.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hecate.runtime.comm import queue
from hecate.runtime.comm.queue import Job
from hecate.runtime.ops import registration


class Hostile:
    """Counts what it did.

    Attributes:
        late: collectives that ran after a delay.
        poisoned: tensors that were overwritten.
    """

    def __init__(self, *, reads_late: bool = False) -> None:
        self.late = self.poisoned = 0
        self._reads_late = reads_late
        self._random = random.Random(0)

    def begin(self, prepare: Callable[..., Job], args: Sequence[Any], note: str) -> int:
        copies = tree_map(lambda value: value.clone() if _is_floating(value) else value, list(args))
        if self._reads_late:
            prepare = _reading_late(prepare)
        job = prepare(*copies)
        number = queue.start(Job(job.queue, self._late(job.run), job.meanwhile, job.finish), note)
        self._poison(copies)
        return number

    def _late(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def late() -> Any:
            time.sleep(self._random.uniform(0.001, 0.004))
            result = run()
            kept = {tensor.untyped_storage()._cdata for tensor in tree_leaves(result)}
            own = [cell.cell_contents for cell in run.__closure__ or ()]
            self._poison([t for t in _floating(own) if t.untyped_storage()._cdata not in kept])
            self.late += 1
            return result

        return late

    def _poison(self, values: Any) -> None:
        for tensor in _floating(values):
            tensor.fill_(float("nan"))
            self.poisoned += 1


def _reading_late(prepare: Callable[..., Job]) -> Callable[..., Job]:
    """A planted fault: a collective that reads its arguments when it runs."""

    def late(*args: Any) -> Job:
        job = prepare(*args)
        return Job(job.queue, lambda: prepare(*args).run(), job.meanwhile, job.finish)

    return late


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _floating(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if _is_floating(value)]


@contextmanager
def hostile(*, reads_late: bool = False) -> Iterator[Hostile]:
    """Make all collectives that graphs split hostile; ``reads_late`` plants a fault."""
    state, original = Hostile(reads_late=reads_late), registration.begin
    registration.begin = state.begin
    try:
        yield state
    finally:
        registration.begin = original
        assert not queue._pending, "a graph ended with collectives on their way"
