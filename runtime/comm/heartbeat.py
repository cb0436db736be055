"""Heartbeats: each second a thread writes this rank's entry into torchrun's store, and reads others' when asked to.

It has a connection of its own, since a rank that waits for a key holds its connection. Nothing here blocks the
caller.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hecate.private import default_store

# Seconds between two entries, and seconds after which the store counts as not answering.
EVERY, _STORE = 1.0, timedelta(seconds=5)
# After it was asked, a rank tells details in so many entries.
_ANSWERS = 5
# Entries read in a round; with more ranks, not every round reads.
_READS = 64
_ASKED = "hecate/asked"


@dataclass
class Heard:
    """The last entry of a rank, and since when it has been the last, in seconds of ``time.monotonic``."""

    entry: dict[str, Any] = field(default_factory=dict)
    since: float = 0.0


class Heartbeat:
    """The thread that writes this rank's entries, and reads those of others while ``wanted()``.

    ``entry`` returns JSON-able facts, with details if another rank has asked; ``look`` is called after :attr:`heard`,
    by rank in the default group, is new. :attr:`reached` is when the store last answered.
    """

    def __init__(
        self, entry: Callable[[bool], dict[str, Any]], wanted: Callable[[], bool], look: Callable[[], None]
    ) -> None:
        self._entry, self._wanted, self._look = entry, wanted, look
        self.heard: dict[int, Heard] = {}
        self.reached = time.monotonic()
        self.process = os.getpid()
        self._closed = False
        self._wake, self._told = threading.Event(), threading.Event()
        self._source: dist.Store | None = None
        self._store: Any = None
        self._beat = self._asked = self._answer = self._rank = 0
        self._thread = threading.Thread(target=self._run, name="hecate-watch", daemon=True)
        self._thread.start()

    def tell(self, seconds: float = 0.0) -> None:
        """Write the entry now. Returns when it is written, but after ``seconds`` at the latest."""
        self._told.clear()
        self._wake.set()
        if seconds:
            self._told.wait(seconds)

    def close(self, seconds: float) -> None:
        """Write the entry once more and end within ``seconds``: a thread in the store crashes a process that ends."""
        self._closed = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        closed = False
        while not closed:
            woken, closed = self._wake.wait(EVERY), self._closed
            self._wake.clear()
            try:
                self._round()
                self.reached = time.monotonic()
            except Exception:
                # An unreachable store is a fact to tell; its connection is of no more use.
                self._store = None
            if woken:
                self._told.set()
            # An error here means that the process is ending; then there is nothing to say.
            with suppress(Exception):
                self._look()

    def _round(self) -> None:
        store = self._connected()
        if store is None:
            return
        wanted, self._beat = self._wanted(), self._beat + 1
        asked = store.add(_ASKED, int(wanted))
        if asked != self._asked:
            self._asked, self._answer = asked, _ANSWERS
        self._answer -= 1
        self._rank, size = dist.get_rank(), dist.get_world_size()
        store.set(_key(self._rank), json.dumps({"beat": self._beat, **self._entry(self._answer >= 0)}))
        if not wanted:
            # Old entries say nothing about who is silent now.
            self.heard = {}
        elif self._beat % (1 + size // _READS) == 0:
            self._read(store, size)

    def _read(self, store: Any, size: int) -> None:
        keys = [_key(rank) for rank in range(size)]
        # Reading a key waits until it is there.
        texts = (
            store.multi_get(keys)
            if store.check(keys)
            else [store.get(key) if store.check([key]) else b"" for key in keys]
        )
        for rank, text in enumerate(texts):
            entry, before = json.loads(text) if text else {}, self.heard.get(rank)
            if before is None or before.entry.get("beat") != entry.get("beat"):
                self.heard[rank] = Heard(entry, time.monotonic())

    def _connected(self) -> Any:
        """Return the store over a connection of our own; None where there is none that other processes see."""
        try:
            source = default_store() if dist.is_initialized() else None
        except ValueError:
            source = None
        if source is not self._source or self._store is None:
            if source is None and self._store is not None:
                self._store.set(_key(self._rank), json.dumps({"beat": self._beat + 1, "left": True}))
            self._source, self._store = source, None
            if source is not None and _shared(source):
                own: Any = source
                self._store = own.clone()
                self._store.set_timeout(_STORE)
        return self._store

    def silence(self, rank: int) -> float | None:
        """Return for how many seconds a rank has told nothing new; None while that cannot be known."""
        now, heard = time.monotonic(), self.heard.get(rank)
        return None if heard is None or now - self.reached > 2 * EVERY else now - heard.since


def _shared(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore | dist.FileStore)


def _key(rank: int) -> str:
    return f"hecate/watch/{rank}"
