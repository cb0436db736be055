"""Say who waits for whom, in what, when a collective takes long: ranks that call different things hang otherwise.

A thread looks every second. What has waited for ten seconds is written to the log of each rank that waits, with what
the others said of themselves in the store that torchrun has open. NCCL does not block the host, and has a watchdog.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import torch.distributed as dist

log = logging.getLogger("hecate")

# When a wait is told of, in seconds; then each time twice as long.
FIRST = 10.0
_EVERY = 1.0
_doing: ContextVar[str] = ContextVar("_doing", default="a collective")


@dataclass(eq=False)
class _Wait:
    """A thread that is in a collective.

    Attributes:
        next: seconds after which it is told of.
    """

    what: str
    group: dist.ProcessGroup
    since: float
    next: float


_waits: dict[int, _Wait] = {}
_lock = threading.Lock()
_watcher: threading.Thread | None = None


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what collectives inside the block are for, as the user knows it: "hecate.stats"."""
    token = _doing.set(what)
    try:
        yield
    finally:
        _doing.reset(token)


@contextmanager
def waiting(group: dist.ProcessGroup) -> Iterator[None]:
    """Around everything that waits for other ranks."""
    _start()
    thread = threading.get_ident()
    wait = _waits[thread] = _Wait(_doing.get(), group, time.monotonic(), FIRST)
    try:
        yield
    finally:
        _waits.pop(thread, None)
        if wait.next > FIRST:
            with suppress(Exception):
                dist.distributed_c10d._get_default_store().set(_key(dist.get_rank()), "")


def _start() -> None:
    global _watcher
    if _watcher is None:
        with _lock:
            if _watcher is None:
                _watcher = threading.Thread(target=_watch, name="hecate-waiting", daemon=True)
                _watcher.start()


def _watch() -> None:
    while True:
        time.sleep(_EVERY)
        for wait in list(_waits.values()):
            seconds = time.monotonic() - wait.since
            if seconds >= wait.next:
                wait.next *= 2
                # The process may be on its way out; then there is nothing to say.
                with suppress(Exception):
                    _tell(wait, seconds)


def _tell(wait: _Wait, seconds: float) -> None:
    own = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    store.set(_key(own), wait.what)
    others = []
    for rank in dist.get_process_group_ranks(wait.group):
        if rank != own:
            key = _key(rank)
            said = store.get(key).decode() if store.check([key]) else ""
            others.append(f"rank {rank} {f'waits in {said}' if said else 'does not say that it waits'}")
    log.warning(
        "hecate: rank %d has waited for %.0f s in %s: %s. All ranks must call it together.",
        own, seconds, wait.what, "; ".join(others),
    )  # fmt: skip


def _key(rank: int) -> str:
    return f"hecate/waiting/{rank}"
