"""A rank's share of a core: entered by its main thread, with the help of a control group or by sleeping."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.emulator.quota import Group

# Seconds after which a thread that was made inside is out of the quota, at most.
FREED = 0.05
# The group whose quota the main thread has now.
_entered: Group | None = None


@contextmanager
def throttled() -> Iterator[None]:
    """Run the block with this rank's quota, as the launcher set it up; without a launcher, at full speed.

    For scripts that compile first and measure later (``--quota-by-script``). Call it in the main thread.
    """
    group = group_of_environment()
    if group is None:
        with _sleeping(float(os.environ.get("HECATE_CLUSTER_CORES", "0"))):
            yield
        return
    thread = threading.get_native_id()
    stop = threading.Event()
    # Threads that communicate inherit the group of the thread that made them, at any time.
    watcher = threading.Thread(target=_free_others, args=(group, thread, stop), name="hecate-cluster", daemon=True)
    watcher.start()
    global _entered
    group.enter(thread)
    _entered = group
    try:
        yield
    finally:
        _entered = None
        group.leave(thread)
        stop.set()
        watcher.join()


@contextmanager
def unthrottled() -> Iterator[None]:
    """Run the block without the quota, for what is not timed in the middle of what is. In the main thread.

    Without a control group it stays as slow as it is.
    """
    group, thread = _entered, threading.get_native_id()
    if group is None:
        yield
        return
    group.leave(thread)
    try:
        yield
    finally:
        group.enter(thread)


def group_of_environment() -> Group | None:
    """This rank's group."""
    text = os.environ.get("HECATE_CLUSTER_GROUP")
    if not text:
        return None
    version, path, outside = text.split(":")
    return Group(int(version), Path(path), Path(outside))


def _free_others(group: Group, main: int, stop: threading.Event) -> None:
    free: set[int] = set()
    while not stop.wait(FREED):
        threads = {int(name) for name in os.listdir("/proc/self/task")} - {main}
        for thread in threads - free:
            group.leave(thread)
        free = threads


@contextmanager
def _sleeping(cores: float) -> Iterator[None]:
    """Stop the main thread so that it computes only ``cores`` of the time: coarser than a control group.

    A timer signal every few milliseconds of CPU time makes the main thread sleep for the rest of its period.
    """
    import signal

    if cores <= 0 or cores >= 1:
        yield
        return
    spent = time.thread_time()

    def rest(*_: object) -> None:
        # Signals that came during one long operation are one, so what counts is the time that it took.
        nonlocal spent
        # Another signal may come between the two clocks, and rest for both.
        time.sleep(max(0.0, time.thread_time() - spent) * (1 / cores - 1))
        spent = time.thread_time()

    before = signal.signal(signal.SIGPROF, rest)
    signal.setitimer(signal.ITIMER_PROF, 0.004, 0.004)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
