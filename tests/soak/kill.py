"""Kill somebody at a given place in saving, loading or moving experts, from inside of a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hecate.checkpoints import load, manifest, publish, restore, save
from hecate.runtime.comm import collectives

# Places that every rank comes to, and those of rank 0 alone.
EVERYWHERE = ("step", "write", "written", "hashed", "moving", "verifying", "reading", "background")
FIRST_ONLY = ("half a manifest", "manifest", "before the rename", "after the rename", "published", "removing")
WHOM = ("me", "rank 0", "another", "all ranks", "agent", "everything")


@dataclass(frozen=True)
class Kill:
    """Who is killed where.

    Attributes:
        place: one of ``EVERYWHERE`` or ``FIRST_ONLY``.
        time: the how many-eth time that somebody is there.
        by: the rank that does it, if all come there.
        whom: one of ``WHOM``.
        delay: seconds after it was there.
    """

    place: str
    time: int
    by: int
    whom: str
    delay: float = 0.0


class Killer:
    """Waits for its place, if it is armed."""

    def __init__(self, kill: Kill, rank: int, size: int, pids: Path, *, armed: bool) -> None:
        self._kill, self._rank, self._size, self._pids, self._count = kill, rank, size, pids, 0
        self._mine = armed and rank == (0 if kill.place in FIRST_ONLY else kill.by % size)
        if self._mine:
            self._go_through_places()

    def at(self, place: str) -> None:
        """This rank is at a place."""
        if not self._mine or place != self._kill.place:
            return
        self._count += 1
        if self._count != self._kill.time:
            return
        if self._kill.delay:
            threading.Timer(self._kill.delay, self._strike).start()
        else:
            self._strike()

    def _strike(self) -> None:
        whom, agent = self._kill.whom, os.getppid()
        ranks = {
            "me": [self._rank],
            "rank 0": [0],
            "another": [(self._rank + 1) % self._size],
            "agent": [],
            "all ranks": range(self._size),
            "everything": range(self._size),
        }[whom]
        numbers = [int((self._pids / f"rank{rank}.pid").read_text()) for rank in ranks]
        # This rank last, or the others would live.
        numbers.sort(key=lambda number: number == os.getpid())
        if whom in ("agent", "everything"):
            numbers.insert(0, agent)
        for number in numbers:
            os.kill(number, signal.SIGKILL)
        # What comes now must not happen any more, if this rank is one of them.
        if whom != "another" and (whom != "rank 0" or self._rank == 0):
            time.sleep(5)

    def _go_through_places(self) -> None:
        _before(save.dcp.FileSystemWriter, "write_data", lambda *_: self.at("write"))
        _before(save, "record_files", lambda *_: self.at("written"))
        _before(publish, "publish", lambda *_: self.at("hashed"))
        _before(publish, "write_manifest", self._half_a_manifest)
        _after(publish, "write_manifest", lambda: self.at("manifest"))
        _before(Path, "rename", lambda path, *_: self.at("before the rename") if ".tmp-" in path.name else None)
        _after(Path, "rename", lambda: self.at("after the rename"))
        _after(publish, "publish", lambda: self.at("published"))
        _before(publish, "_remove", lambda steps: self.at("removing") if steps else None)
        _before(collectives, "move_shards", lambda *_: self.at("moving"))
        _before(load, "check_files", lambda *_: self.at("verifying"))
        _before(restore.TensorReader, "read_data", lambda *_: self.at("reading"))

    def _half_a_manifest(self, whole: manifest.Manifest, folder: Path) -> None:
        if self._kill.place == "half a manifest" and self._count + 1 == self._kill.time:
            (folder / manifest.NAME).write_text('{"files": {"__0_0.dist')
        self.at("half a manifest")


def _before(owner: Any, name: str, do: Callable[..., Any]) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        do(*args)
        return inner(*args, **kwargs)

    setattr(owner, name, outer)


def _after(owner: Any, name: str, do: Callable[[], Any]) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        do()
        return result

    setattr(owner, name, outer)
