"""State of this rank's program: its calls of models, its errors and its end, the collective that it is in."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from hecate.private import count_collectives, group_named

# Calls that wait for one other rank, or for none.
_NOT_OF_ALL = {
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
    "init_process_group",
    "destroy_process_group",
    "new_group",
    "monitored_barrier",
}
# Seconds after which a rank that is in a collective of its program counts as one that stays there.
_STAYS = 4.0

# Calls of compiled models by this rank.
_forwards = 0


def count_forward() -> None:
    """Count a forward of a compiled model that begins; all ranks must call equally many."""
    global _forwards
    _forwards += 1


def forwards() -> int:
    """Return how often this rank has called compiled models."""
    return _forwards


def behind(others: int) -> str:
    """Say in brackets that another rank has called models less often than this one; "" if it has not."""
    if others >= _forwards:
        return ""
    return (
        f" (it has called the model {_times(others)} and this rank {_times(_forwards)}: has its loop ended earlier? "
        "Give all ranks equally many batches, in evaluations too, and model.generate synced_gpus=True)"
    )


@dataclass(frozen=True)
class Place:
    """A collective that the program itself has called and waits in: "torch.distributed.barrier (train.py, line 7)".

    ``number`` is its place among the collectives of its group, as ``torch.distributed`` counts them.
    """

    what: str
    group: str
    ranks: tuple[int, ...]
    number: int

    def misses_this_rank(self) -> bool:
        """Tell whether the collective waits for this rank, which has not called it."""
        if dist.get_rank() not in self.ranks:
            return False
        try:
            group = group_named(self.group)
        except (RuntimeError, KeyError):
            return False
        return self.ranks == tuple(dist.get_process_group_ranks(group)) and count_collectives(group) < self.number


_seen: Place | None = None
_since = 0.0


def told_place() -> dict[str, Any] | None:
    """Return where the main thread waits, and for how many seconds it has been seen there; for :func:`place_of`."""
    global _seen, _since
    found = _place()
    if found is None or found != _seen:
        _seen, _since = found, time.monotonic()
    return None if found is None else vars(found) | {"seconds": time.monotonic() - _since}


def place_of(told: Mapping[str, Any] | None) -> Place | None:
    """Return the place that another rank told, if it stays there."""
    if told is None or told["seconds"] < _STAYS:
        return None
    return Place(told["what"], told["group"], tuple(told["ranks"]), told["number"])


def _place() -> Place | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    called, group = "", None
    while frame is not None and _module(frame).startswith("torch."):
        if _module(frame) == "torch.distributed.distributed_c10d":
            called, group = frame.f_code.co_name, group or frame.f_locals.get("group")
        frame = frame.f_back
    # Collectives of Hecate's own are watched by themselves.
    if frame is None or not called or called in _NOT_OF_ALL or _module(frame).partition(".")[0] == "hecate":
        return None
    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    where = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    ranks = tuple(dist.get_process_group_ranks(group))
    return Place(f"torch.distributed.{called} ({where})", group.group_name, ranks, count_collectives(group))


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


@dataclass(frozen=True)
class Failure:
    """An error on this rank, or its end (``final``); ``started`` counts collectives begun by then, by group."""

    text: str
    started: Mapping[str, int]
    since: float
    final: bool


failure: Failure | None = None
# Collectives that this rank had started when it last failed, by group, whether it went on or not.
failed_at: Mapping[str, int] = {}


def going_on() -> None:
    """Note that this rank takes part again: an error that it told of was of no consequence."""
    global failure
    if failure is not None and not failure.final:
        failure = None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")


def note_failure(error: BaseException | None, where: str, started: Mapping[str, int], *, final: bool) -> None:
    """Remember that this rank failed, or ended; arguments as of :class:`Failure`."""
    global failure, failed_at
    if error is not None:
        what = f"raised {type(error).__name__}: {first_line(error)}"
    else:
        what = "ended its program" if failure is None else f"{failure.text} and ended"
    failed_at = started
    failure = Failure(f"{what} {where}".rstrip(), started, time.monotonic(), final)


def told_failure() -> dict[str, Any] | None:
    """Return the failure and its age in seconds, for other ranks."""
    found = failure
    return None if found is None else vars(found) | {"seconds": time.monotonic() - found.since}
