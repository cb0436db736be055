"""A worker must not outlive the agent that started it: nobody would end it, and it would train, and save, on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_done = False


def end_with_agent() -> None:
    """Under torchrun on Linux: when the agent dies, however it does, so does this process."""
    global _done
    if _done or not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _done = True
    parent = os.getppid()
    if not _is_agent(parent):
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have died before this was asked for.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _is_agent(pid: int) -> bool:
    """Whether a process started the first one with the run's environment. What a worker starts ends as it likes."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            return not any(entry.startswith(b"TORCHELASTIC_RUN_ID=") for entry in environment.read().split(b"\0"))
    except OSError:
        return False
