"""Say who waits for whom, in what, when a collective takes long: ranks that call different things hang otherwise.

A thread looks every second. Of what has waited for two seconds it tells the others, and finds out whether it can end
at all (:mod:`hecate.runtime.comm.faults`). What has waited for ten is written to the log of each rank that waits,
with what the others told. With NCCL the host waits for little but counts of rows, and is watched there
(:func:`hecate.runtime.comm.supervise.wait_for_device`); the rest is left to NCCL's own watchdog.

What users call themselves, and may call on one rank alone, waits for the others in the store that torchrun has open
before it communicates (:func:`meet`), and raises as soon as one of them is in something else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hecate.private import timeout_on
from hecate.runtime.comm import bulletin as bulletins
from hecate.runtime.comm import failures, faults, program
from hecate.runtime.comm.bulletin import add_part, bulletin, entry_of
from hecate.runtime.comm.history import from_plain, history_of
from hecate.runtime.comm.start import store_of

log = logging.getLogger("hecate")

# When a wait is told to the others, in seconds; and when it is logged, and then each time after twice as long.
TOLD = 2.0
FIRST = 10.0
_doing: ContextVar[str] = ContextVar("_doing", default="a collective")


@dataclass(eq=False)
class Wait:
    """A thread that is in a collective.

    Attributes:
        number: how many collectives this rank has started on the group, this one included.
        next: seconds after which it is logged.
        reads: how often others had been read when it was last looked at.
        problem: why it will not end, once that is known.
    """

    what: str
    group: dist.ProcessGroup
    number: int
    since: float
    next: float
    reads: int = 0
    problem: faults.Problem | None = None


_waits: dict[int, Wait] = {}
# By the group's name: meetings that this rank has come to.
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
def watched(group: dist.ProcessGroup, what: str = "") -> Iterator[Wait]:
    """Around everything that waits for other ranks.

    Args:
        what: in words; without any, what :func:`doing` says.
    """
    _start()
    thread = threading.get_ident()
    wait = Wait(what or _doing.get(), group, history_of(group).number, time.monotonic(), FIRST)
    _waits[thread] = wait
    try:
        yield wait
    finally:
        _waits.pop(thread, None)


_TOGETHER = "It communicates: call it on all ranks together, not under `if rank == 0`, and write the result on one."


def meet(what: str, group: dist.ProcessGroup, *, advice: str = _TOGETHER) -> None:
    """Wait until all ranks of ``group`` are here, with nothing of theirs on its way.

    Args:
        what: what they are about to do together, as the user calls it.
        advice: what to do where they are not here.

    Raises:
        RuntimeError: a rank waits in something else, which it began after all that this rank has taken part in; or
            one has failed, or does not come before the group's timeout.
    """
    store, own, name = store_of(group), dist.get_rank(), group.group_name
    ranks = dist.get_process_group_ranks(group)
    _met[name] += 1
    keys = {rank: f"hecate/meeting/{name}/{_met[name]}/{rank}" for rank in ranks}
    store.set(keys[own], what)
    pause, end = 0.001, time.monotonic() + timeout_of(group)
    with watched(group, what) as wait:
        while not store.check(list(keys.values())):
            problem = _elsewhere(ranks, group)
            if problem is None and wait.problem is not None:
                raise wait.problem.error_in(what)
            if problem is None and time.monotonic() > end:
                missing = [rank for rank in ranks if not store.check([keys[rank]])]
                problem = f"ranks {missing} did not come before the group's timeout"
            # Whoever came in the meantime may be in what follows the meeting.
            if problem is not None and not store.check(list(keys.values())):
                # As if this rank had not come: it may do so later, with all others.
                store.delete_key(keys[own])
                _met[name] -= 1
                raise RuntimeError(f"hecate: {what} on rank {own}, but {problem}. {advice}")
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
    for rank in ranks:
        other = store.get(keys[rank]).decode()
        if other != what:
            raise RuntimeError(f"hecate: {what} on rank {own}, but rank {rank} calls {other}. {advice}")
    # Everybody has left the meeting before this one.
    store.delete_key(f"hecate/meeting/{name}/{_met[name] - 1}/{own}")


def _elsewhere(ranks: list[int], group: dist.ProcessGroup) -> str | None:
    """A rank that waits in a collective which this one has not begun, and what that is."""
    for rank in ranks:
        told = entry_of(rank).get("waits", {}).get(group.group_name)
        if told is not None and told["number"] > history_of(group).number:
            return f"rank {rank} waits in {told['what']}"
    return None


def timeout_of(group: dist.ProcessGroup) -> float:
    """How many seconds ranks of ``group`` wait for each other."""
    # Not get_backend, which repeats the text that a group was made with.
    backends = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    asked = [device for device, name in backends.items() if name in ("gloo", "nccl")]
    found = [timeout for device in asked if (timeout := timeout_on(group, device))]
    return float(min(found, default=dist.distributed_c10d.default_pg_timeout).total_seconds())


def _start() -> None:
    global _watcher
    if _watcher is None:
        with _lock:
            if _watcher is None:
                bulletin()
                failures.watch_program()
                _watcher = threading.Thread(target=_watch, name="hecate-waiting", daemon=True)
                _watcher.start()


def _watch() -> None:
    while True:
        time.sleep(bulletins.EVERY)
        for wait in list(_waits.values()):
            seconds = time.monotonic() - wait.since
            # The process may be on its way out; then there is nothing to say.
            with suppress(Exception):
                if seconds >= TOLD and wait.problem is None:
                    bulletin().listen()
                    if wait.reads != bulletin().reads:
                        wait.reads = bulletin().reads
                        wait.problem = faults.verdict(wait.group)
                if seconds >= wait.next:
                    wait.next *= 2
                    _log(wait, seconds)


def _log(wait: Wait, seconds: float) -> None:
    own = dist.get_rank()
    others = [_state(rank, wait.group) for rank in dist.get_process_group_ranks(wait.group) if rank != own]
    log.warning(
        "hecate: rank %d has waited for %.0f s in %s: %s. All ranks must call it together.",
        own, seconds, wait.what, "; ".join(others),
    )  # fmt: skip


def _state(rank: int, group: dist.ProcessGroup) -> str:
    silent = bulletin().silence(rank)
    if silent is not None and silent > 5 * bulletins.EVERY:
        return f"rank {rank} has not been heard of for {silent:.0f} s"
    heard = bulletin().heard.get(rank)
    entry, name = heard.entry if heard is not None else {}, group.group_name
    told, behind = entry.get("waits", {}).get(name), program.behind(entry.get("forwards", program.forwards()))
    if told:
        return f"rank {rank} waits in {told['what']}{behind}"
    last = from_plain(entry.get("groups", {}).get(name, {}).get("calls", [])[-1:])
    return f"rank {rank} does not say that it waits" + (f", and began last {last[0]}" if last else "") + behind


def _told(asked: bool) -> dict[str, Any]:
    waits = [wait for wait in list(_waits.values()) if time.monotonic() - wait.since >= TOLD]
    told = {wait.group.group_name: {"what": wait.what, "number": wait.number} for wait in waits}
    # What waits on another thread may still come to what the program is in.
    place = program.told_place() if asked and not _waits else None
    return {"waits": told, "forwards": program.forwards(), "place": place}


add_part(_told)
