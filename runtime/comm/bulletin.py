"""What ranks tell each other beside the collectives: one entry a rank, in the store that torchrun has open.

A thread writes this rank's entry every second, so others see that it is alive. It reads theirs only while somebody
here wants to know, and on a connection of its own: whoever waits for a key holds the connection meanwhile. Nothing
here blocks the caller, so a store that cannot be reached is a fact to tell, not one more hang.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hecate.private import default_store

# Seconds between two rounds, and of patience with the store.
EVERY = 1.0
_PATIENCE = timedelta(seconds=5)
# Rounds in which a rank goes on to tell its last collectives after somebody asked.
_ANSWERS = 5
# Entries that are read in a round; with more ranks, not every round reads.
_READS = 64
_ASKED = "hecate/asked"


@dataclass
class Heard:
    """What a rank told last, and since when it has told nothing new, in seconds of ``time.monotonic``."""

    entry: dict[str, Any] = field(default_factory=dict)
    beat: int = -1
    since: float = 0.0


class Bulletin:
    """This rank's entry, and those of others.

    Attributes:
        heard: by rank in the default group; only what was read since somebody began to listen.
        reads: how often they were read.
        reached: when the store last answered.
    """

    def __init__(self) -> None:
        self.heard: dict[int, Heard] = {}
        self.reads = 0
        self.reached = time.monotonic()
        self._listened_until = 0.0
        self._closed = False
        self._wake, self._told = threading.Event(), threading.Event()
        self._source: dist.Store | None = None
        self._store: Any = None
        self._beat = self._asked = self._answer = self._rank = 0
        self._thread = threading.Thread(target=self._run, name="hecate-bulletin", daemon=True)
        self._thread.start()

    def listen(self) -> None:
        """Ask all ranks, and read what they tell, for the next seconds."""
        now = time.monotonic()
        if now > self._listened_until:
            # What was heard long ago says nothing about who is silent now.
            self.heard = {}
            self._wake.set()
        self._listened_until = now + 3 * EVERY

    def tell(self, seconds: float = 0.0) -> None:
        """Write the entry now. Returns when it is written, but after ``seconds`` at the latest."""
        self._told.clear()
        self._wake.set()
        if seconds:
            self._told.wait(seconds)

    def close(self, seconds: float) -> None:
        """Write the entry once more and end, after ``seconds`` at the latest.

        A thread that is in the store when the interpreter ends would take the process down with it.
        """
        self._closed = True
        self._wake.set()
        self._thread.join(seconds)

    def silence(self, rank: int) -> float | None:
        """For how many seconds a rank has told nothing new; None while that cannot be known."""
        now, heard = time.monotonic(), self.heard.get(rank)
        return None if heard is None or now - self.reached > 2 * EVERY else now - heard.since

    def _run(self) -> None:
        while not self._closed:
            woken = self._wake.wait(EVERY)
            self._wake.clear()
            try:
                self._round()
                self.reached = time.monotonic()
            except Exception:
                # A connection that failed in the middle of an answer is of no more use.
                self._store = None
            if woken:
                self._told.set()

    def _round(self) -> None:
        store = self._connected()
        if store is None:
            return
        self._beat += 1
        listening = time.monotonic() < self._listened_until
        asked = store.add(_ASKED, int(listening))
        if asked != self._asked:
            self._asked, self._answer = asked, _ANSWERS
        self._answer -= 1
        entry: dict[str, Any] = {"beat": self._beat}
        for part in _parts:
            entry |= part(self._answer >= 0)
        self._rank = dist.get_rank()
        store.set(_key(self._rank), json.dumps(entry))
        size = dist.get_world_size()
        if listening and self._beat % (1 + size // _READS) == 0:
            self._read(store, size)

    def _read(self, store: dist.Store, size: int) -> None:
        for rank, text in enumerate(_read(store, [_key(rank) for rank in range(size)])):
            heard = self.heard.get(rank) or Heard(since=time.monotonic())
            entry = json.loads(text) if text else {}
            if entry.get("beat", -1) != heard.beat:
                heard = Heard(entry, entry.get("beat", -1), time.monotonic())
            self.heard[rank] = heard
        self.reads += 1

    def _connected(self) -> dist.Store | None:
        """The store over a connection of our own; None where there is none that other processes see."""
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
                self._store.set_timeout(_PATIENCE)
        return self._store


_parts: list[Callable[[bool], dict[str, Any]]] = []
_bulletin: Bulletin | None = None
_lock = threading.Lock()


def add_part(part: Callable[[bool], dict[str, Any]]) -> None:
    """Have something told in every round: JSON-able; gets whether somebody asks for the last collectives."""
    _parts.append(part)


def bulletin() -> Bulletin:
    """That of this process; begins when it is first asked for."""
    global _bulletin
    if _bulletin is None:
        with _lock:
            if _bulletin is None:
                _bulletin = Bulletin()
    return _bulletin


def entry_of(rank: int) -> dict[str, Any]:
    """What a rank told last, read in the caller's thread; empty if nothing."""
    (text,) = _read(default_store(), [_key(rank)])
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def _read(store: dist.Store, keys: list[str]) -> list[bytes]:
    # Reading a key waits until it is there.
    if store.check(keys):
        return store.multi_get(keys)
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def _shared(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore | dist.FileStore)


def _key(rank: int) -> str:
    return f"hecate/bulletin/{rank}"
