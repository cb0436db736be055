"""A lock that one process at a time holds, with a file as its name."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


class FileLock:
    """A lock, held until :meth:`release`, the end of a ``with`` block, or the end of this object or its process.

    The file ``path`` is made and stays. TimeoutError is raised if the lock is not free within ``patience`` seconds.
    """

    def __init__(self, path: Path, patience: float = 0.0) -> None:
        end = time.monotonic() + patience
        file = path.open("w")
        while not _taken(file):
            if time.monotonic() >= end:
                file.close()
                raise TimeoutError(f"another process has held {path} for {patience:.0f} s")
            time.sleep(0.05)
        self._release = weakref.finalize(self, _let_go, file, os.getpid())

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        self._release()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _taken(file: IO[Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The disk knows no locks, like some over a network: nobody is kept out.
        pass
    return True


def _let_go(file: IO[Any], owner: int) -> None:
    with suppress(OSError):
        if os.getpid() == owner:
            # Explicitly: processes that were forked meanwhile have the file too, and would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
