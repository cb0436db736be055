"""Process groups that a restart by torchrun does not confuse.

torchrun keeps one store for all starts of a run, with addresses of dead ranks in it (pytorch#135712, #167288). So the
ranks of a start agree on a text that no other start had, and all of Hecate's keys begin with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hecate.private import default_group, default_store, groups, timeout_on

_PAUSE = 0.01
_PR_SET_PDEATHSIG = 1
_ends_with_agent = False
# Default groups that were started here: all their keys begin with the text of this start.
_fresh: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
# The text that stands before the keys of each other group; groups that are missing have none.
_starts: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def start_process_group(
    own: str, backend_for: Callable[[list[str]], str | None], *, timeout: timedelta | None = None
) -> None:
    """Call ``dist.init_process_group()`` for ranks of torchrun, whatever an earlier start left in the store.

    ``backend_for`` gets the text ``own`` of every rank, by rank, and returns the backend. ``timeout`` is that of the
    group, by default its backend's. Raises TimeoutError with the ranks that did not come.
    """
    wait = timeout if timeout is not None else dist.distributed_c10d.default_pg_timeout
    store, rank, size = next(dist.rendezvous("env://", timeout=wait))
    start = agree_on_start(store, rank, size, wait) if _store_outlives_ranks() else "start"
    store = dist.PrefixStore(f"hecate/{start}", store)
    backend = backend_for(_exchange(store, own, rank, size))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    _fresh.add(default_group())


def _exchange(store: dist.Store, own: str, rank: int, size: int) -> list[str]:
    """Return the texts of all ranks, by rank."""
    store.set(f"told/{rank}", own)
    if rank == 0:
        # Rank 0 puts all texts under one key: each rank reads once, however many there are.
        store.set("told", json.dumps([store.get(f"told/{number}").decode() for number in range(size)]))
    found: list[str] = json.loads(store.get("told"))
    return found


def new_group_beside(
    *groups: dist.ProcessGroup,
    backend: str,
    timeout: timedelta | None,
    what: str,
    ranks: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Any:
    """Create a group of the same ranks, or of these ``ranks``; a collective.

    Args:
        groups: one that has all of its ranks, or several that connect them: the rows of a table, and its columns.
        ranks: numbers in the default group.
        device: where this rank has its tensors.
    """
    ranks = list(ranks) if ranks is not None else dist.get_process_group_ranks(groups[0])
    text = _text_of(groups, device)
    with _own_keys(text):
        own = dist.new_group(
            ranks,
            backend=backend,
            timeout=timeout,
            # Such a group's name counts the groups that a rank is in, which differ between ranks.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            group_desc=what,
        )
    if text is not None:
        _starts[own] = text
    return own


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store for what ranks of ``group`` tell each other."""
    store, text = default_store(), _starts.get(group)
    return store if text is None else dist.PrefixStore(f"hecate/{text}", store)


def agree_on_start(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a text that is the same on all ranks, and that no earlier start on this store had.

    Every rank says hello with a text of its own, and rank 0 offers a text to those that it hears, again at each new
    hello. A rank that finds its hello in the offer knows that it is new. Raises TimeoutError with the ranks that did
    not come.
    """
    end = time.monotonic() + timeout.total_seconds()
    own = uuid.uuid4().hex
    if rank == 0:
        return _offer(store, own, size, end)
    store.set(f"hecate/hello/{rank}", own)
    while True:
        offer = json.loads(_read(store, "hecate/offer") or "{}")
        if offer.get("heard", {}).get(str(rank)) == own:
            store.set(f"hecate/seen/{rank}", offer["text"])
            return str(offer["text"])
        if time.monotonic() > end:
            raise TimeoutError(f"hecate: rank 0 did not start within {timeout.total_seconds():.0f} s")
        time.sleep(_PAUSE)


def _offer(store: dist.Store, text: str, size: int, end: float) -> str:
    heard: dict[str, str] = {}
    missing: Sequence[int] = range(1, size)
    while missing:
        told = {str(rank): _read(store, f"hecate/hello/{rank}") for rank in range(1, size)}
        if told != heard:
            heard = told
            store.set("hecate/offer", json.dumps({"text": text, "heard": heard}))
        missing = [rank for rank in missing if _read(store, f"hecate/seen/{rank}") != text]
        if missing and time.monotonic() > end:
            raise TimeoutError(f"hecate: ranks {list(missing)} did not start in time")
        time.sleep(_PAUSE if missing else 0)
    return text


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


@contextmanager
def _own_keys(text: str | None) -> Iterator[None]:
    """Put the addresses of groups that are made inside the block under keys of this start."""
    if text is None:
        yield
        return
    every, default = groups(), default_group()
    before = every[default]
    every[default] = (before[0], dist.PrefixStore(f"hecate/{text}", before[1]))
    try:
        yield
    finally:
        every[default] = before


def _text_of(groups: Sequence[dist.ProcessGroup], device: torch.device | None) -> str | None:
    """Return the text of groups of the user's, which is their first rank's; None where none is needed.

    A collective when it is first asked for.
    """
    first = groups[0]
    known = _starts.get(first) if len(groups) == 1 else None
    if known is not None or default_group() in _fresh or not _store_outlives_ranks():
        return known
    kinds = backends_of(first)
    own = device if device is not None and device.type in kinds else torch.device(next(iter(kinds)))
    number = torch.tensor([uuid.uuid4().int >> 65], device="cpu" if "cpu" in kinds else own)
    for group in groups:
        dist.broadcast(number, group=group, group_src=0)
    text = f"{int(number):x}"
    if len(groups) == 1:
        _starts[first] = text
    return text


def _store_outlives_ranks() -> bool:
    """Tell whether the store is torchrun's own; otherwise it began with this start."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend for each kind of device; ``get_backend`` repeats the text that a group was made with."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return how many seconds ranks of ``group`` wait for each other."""
    asked = [device for device, name in backends_of(group).items() if name in ("gloo", "nccl")]
    found = [timeout for device in asked if (timeout := timeout_on(group, device))]
    return float(min(found, default=dist.distributed_c10d.default_pg_timeout).total_seconds())


def end_with_agent() -> None:
    """Let this process die with torchrun's agent, or it would train, and save, on. Linux only."""
    global _ends_with_agent
    if _ends_with_agent or not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _ends_with_agent = True
    parent = os.getppid()
    if not _is_agent(parent):
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The agent may have died before the signal was asked for.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _is_agent(pid: int) -> bool:
    """Tell whether the process is torchrun's agent: only its environment has no id of the run."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            return not any(entry.startswith(b"TORCHELASTIC_RUN_ID=") for entry in environment.read().split(b"\0"))
    except OSError:
        return False
