"""A folder that one process at a time writes to."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path


class FolderLock:
    """Held until :meth:`release`, or until this object or its process is gone. It leaves no file behind.

    Raises:
        BlockingIOError: somebody holds it, in this process or another.
        OSError: the folder cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            # A disk that knows no locks, such as some over a network: nobody is kept out there.
            pass
        self._let_go = weakref.finalize(self, _let_go, descriptor, os.getpid())

    def release(self) -> None:
        """Let others have it. A second call does nothing."""
        self._let_go()


def _let_go(descriptor: int, owner: int) -> None:
    with suppress(OSError):
        if os.getpid() == owner:
            # Said outright: processes that were forked meanwhile have the descriptor too, and would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
