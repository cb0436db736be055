"""A transport that makes races visible: collectives run late, and what the graph has let go of turns into NaN.

A collective reads its tensors some time after it was started. Between start and wait the graph must keep them: a
tensor that only the collective itself still holds by then might have been overwritten, so it is.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hecate.runtime import queue
from hecate.runtime.queue import CollectiveQueue, Job


class Hostile:
    """Counts what it did.

    Attributes:
        delayed: collectives that ran late.
        poisoned: tensors that nobody kept for them.
    """

    def __init__(self) -> None:
        self.delayed = self.poisoned = 0
        self._random = random.Random(0)

    def wrap(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def late() -> Any:
            time.sleep(self._random.uniform(0.0, 0.004))
            self.delayed += 1
            for holder in _holders(run):
                for index in range(len(holder)):
                    if _held_by_nobody_else(holder, index):
                        holder[index].fill_(float("nan"))
                        self.poisoned += 1
            return run()

        return late


def _holders(run: Callable[[], Any]) -> list[list[Any]]:
    """The floating-point tensors in a job's closure, as lists with one reference each, without its own memory."""
    found = []
    if isinstance(run, partial):
        contents = list(run.args)
    else:
        cells = zip(run.__code__.co_freevars, run.__closure__ or (), strict=True)
        contents = [cell.cell_contents for name, cell in cells if name not in ("buffer", "parts")]
    for content in contents:
        if isinstance(content, torch.Tensor):
            found.append([content])
        elif isinstance(content, (list, tuple)) and content and isinstance(content[0], torch.Tensor):
            found.append(list(content))
    del content, contents
    return [[t for t in tensors if t.is_floating_point()] for tensors in found]


def _held_by_nobody_else(holder: list[Any], index: int) -> bool:
    # References: the closure (or the list in it), our list, getrefcount's argument; in C++ its Python object.
    return sys.getrefcount(holder[index]) <= 3 and holder[index]._use_count() <= 1


@contextmanager
def hostile() -> Iterator[Hostile]:
    """Make the queues of this process hostile."""
    state, original = Hostile(), CollectiveQueue.submit

    def submit(self: CollectiveQueue, job: Job, note: str) -> Any:
        return original(self, Job(job.queue, state.wrap(job.run), job.meanwhile, job.finish), note)

    CollectiveQueue.submit = submit  # type: ignore[method-assign]
    try:
        yield state
    finally:
        CollectiveQueue.submit = original  # type: ignore[method-assign]
        assert not queue._pending, "a graph ended with collectives on their way"
