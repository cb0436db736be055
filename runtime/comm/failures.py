"""What a rank tells of its own errors, so that others need not guess why it does not come."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hecate.runtime.comm.bulletin import add_part, bulletin
from hecate.runtime.comm.history import known_groups

# How long a rank that ends waits until that is told.
_LAST_WORDS = 5.0


@dataclass(frozen=True)
class _Failure:
    """An error on this rank.

    Attributes:
        started: collectives that it had started by then, by group.
        final: its program ends.
    """

    text: str
    started: Mapping[str, int]
    since: float
    final: bool


_consequences = 0
_failure: _Failure | None = None
_process = 0
# How far this rank was when it last failed, whether it went on or not.
_failed_at: Mapping[str, int] = {}


def note_consequence() -> None:
    """This rank raises because of others. What it raises from now on may come from that, and is not told."""
    global _consequences
    _consequences += 1


def failed_at(group_name: str) -> int | None:
    """How many collectives of a group this rank had started when it last failed, whether it went on or not."""
    return _failed_at.get(group_name)


def going_on() -> None:
    """This rank takes part again; what it told of an error was of no consequence."""
    global _failure
    if _failure is not None and not _failure.final:
        _failure = None


def tell_failure(error: BaseException | None, where: str, *, final: bool = False) -> None:
    """Tell the others of an error on this rank, before they find its connections closed.

    Args:
        where: "in its forward".
        final: the program ends with it.
    """
    if _note_failure(error, where, final=final):
        bulletin().tell(_LAST_WORDS)


def _note_failure(error: BaseException | None, where: str, *, final: bool) -> bool:
    """Whether that is news."""
    global _failure, _failed_at
    # What came from others, they know. A process that was forked has no ranks to tell.
    known = (error is not None and _consequences > 0) or (_failure is not None and _failure.final)
    if known or not known_groups() or not dist.is_initialized() or os.getpid() != _process:
        return False
    if error is not None:
        what = f"raised {type(error).__name__}: {first_line(error)}"
    else:
        what = "ended its program" if _failure is None else f"{_failure.text} and ended"
    _failed_at = {history.group_name: history.number for _, history in known_groups()}
    _failure = _Failure(f"{what} {where}".rstrip(), _failed_at, time.monotonic(), final)
    return True


@contextmanager
def telling(where: str) -> Iterator[None]:
    """Tell the others of an error that leaves the block."""
    going_on()
    try:
        yield
    except Exception as error:
        tell_failure(error, where)
        raise


def first_line(error: BaseException) -> str:
    """Of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def watch_program() -> None:
    """From now on the others hear of it when this process ends, by an exception or in peace."""
    global _process
    before, _process = sys.excepthook, os.getpid()

    def ended(kind: Any, error: BaseException, trace: Any) -> None:
        with suppress(Exception):
            tell_failure(error, "and ended", final=True)
        before(kind, error, trace)

    if threading.current_thread() is threading.main_thread():
        sys.excepthook = ended
    atexit.register(_at_exit)


def _at_exit() -> None:
    with suppress(Exception):
        _note_failure(None, "", final=True)
        bulletin().close(_LAST_WORDS)


def _told(asked: bool) -> dict[str, Any]:
    failure = _failure
    if failure is None:
        return {"failure": None}
    seconds = time.monotonic() - failure.since
    told = {"text": failure.text, "started": failure.started, "seconds": seconds, "final": failure.final}
    return {"failure": told}


add_part(_told)
