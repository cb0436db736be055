"""Say who waits for whom, in what, when a collective takes long: ranks that call different things hang otherwise.

A thread looks every second. Of what has waited for two seconds it tells the others, in the store that torchrun has
open; what has waited for ten is written to the log of each rank that waits, with what the others told. NCCL does not
block the host, and has a watchdog.

What users call themselves, and may call on one rank alone, waits for the others in that store before it communicates
(:func:`meet`), and raises as soon as one of them is in something else.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("hecate")

# When a wait is told to the others, in seconds; and when it is logged, and then each time after twice as long.
TOLD = 2.0
FIRST = 10.0
_EVERY = 1.0
_doing: ContextVar[str] = ContextVar("_doing", default="a collective")


@dataclass(eq=False)
class _Wait:
    """A thread that is in a collective.

    Attributes:
        number: how many collectives this rank has started on the group, this one included.
        next: seconds after which it is logged.
    """

    what: str
    group: dist.ProcessGroup
    number: int
    since: float
    next: float
    told: bool = False


_waits: dict[int, _Wait] = {}
# By the group's name: collectives that this rank has started, and meetings that it has come to.
_started: Counter[str] = Counter()
_met: Counter[str] = Counter()
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
    _started[group.group_name] += 1
    with _watched(group):
        yield


@contextmanager
def _watched(group: dist.ProcessGroup) -> Iterator[None]:
    _start()
    thread = threading.get_ident()
    started = _started[group.group_name]
    wait = _waits[thread] = _Wait(_doing.get(), group, started, time.monotonic(), FIRST)
    try:
        yield
    finally:
        _waits.pop(thread, None)
        if wait.told:
            with suppress(Exception):
                dist.distributed_c10d._get_default_store().set(_key(dist.get_rank()), "")


def meet(what: str, group: dist.ProcessGroup) -> None:
    """Wait until all ranks of ``group`` are here, with nothing of theirs on its way.

    Args:
        what: what they are about to do together, as the user calls it.

    Raises:
        RuntimeError: a rank waits in something else, which it began after all that this rank has taken part in; or
            one does not come before the group's timeout.
    """
    store, own, name = dist.distributed_c10d._get_default_store(), dist.get_rank(), group.group_name
    ranks = dist.get_process_group_ranks(group)
    _met[name] += 1
    keys = {rank: f"hecate/meeting/{name}/{_met[name]}/{rank}" for rank in ranks}
    store.set(keys[own], what)
    pause, end = 0.001, time.monotonic() + _timeout(group)
    with doing(what), _watched(group):
        while not store.check(list(keys.values())):
            problem = _elsewhere(store, ranks, group)
            if problem is None and time.monotonic() > end:
                missing = [rank for rank in ranks if not store.check([keys[rank]])]
                problem = f"ranks {missing} did not come before the group's timeout"
            # Whoever came in the meantime may be in what follows the meeting.
            if problem is not None and not store.check(list(keys.values())):
                # As if this rank had not come: it may do so later, with all others.
                store.delete_key(keys[own])
                _met[name] -= 1
                raise RuntimeError(_alone(what, own, problem))
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
    for rank in ranks:
        other = store.get(keys[rank]).decode()
        if other != what:
            raise RuntimeError(_alone(what, own, f"rank {rank} calls {other}"))
    # Everybody has left the meeting before this one.
    store.delete_key(f"hecate/meeting/{name}/{_met[name] - 1}/{own}")


def _elsewhere(store: dist.Store, ranks: list[int], group: dist.ProcessGroup) -> str | None:
    """A rank that waits in a collective which this one has not begun, and what that is."""
    for rank in ranks:
        told = _told(store, rank)
        if told is not None and told["group"] == group.group_name and told["number"] > _started[group.group_name]:
            return f"rank {rank} waits in {told['what']}"
    return None


def _alone(what: str, own: int, other: str) -> str:
    return (
        f"hecate: {what} on rank {own}, but {other}. It communicates: call it on all ranks together, not under "
        "`if rank == 0`, and write the result on one."
    )


def _timeout(group: dist.ProcessGroup) -> float:
    """Seconds."""
    options = group._get_backend(torch.device("cpu")).options if dist.get_backend(group) == "gloo" else None
    found = getattr(options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout
    return float(found.total_seconds())


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
            if seconds >= TOLD and not wait.told:
                wait.told = True
                with suppress(Exception):
                    text = json.dumps({"what": wait.what, "group": wait.group.group_name, "number": wait.number})
                    dist.distributed_c10d._get_default_store().set(_key(dist.get_rank()), text)
            if seconds >= wait.next:
                wait.next *= 2
                # The process may be on its way out; then there is nothing to say.
                with suppress(Exception):
                    _tell(wait, seconds)


def _tell(wait: _Wait, seconds: float) -> None:
    own = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    others = []
    for rank in dist.get_process_group_ranks(wait.group):
        if rank != own:
            told = _told(store, rank)
            others.append(f"rank {rank} " + (f"waits in {told['what']}" if told else "does not say that it waits"))
    log.warning(
        "hecate: rank %d has waited for %.0f s in %s: %s. All ranks must call it together.",
        own, seconds, wait.what, "; ".join(others),
    )  # fmt: skip


def _told(store: dist.Store, rank: int) -> dict[str, Any] | None:
    """What a rank told of what it waits in."""
    key = _key(rank)
    text = store.get(key).decode() if store.check([key]) else ""
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found


def _key(rank: int) -> str:
    return f"hecate/waiting/{rank}"
