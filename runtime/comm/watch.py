"""Notices hangs and deaths, whatever carries the collectives.

Every second each rank tells the others (``heartbeat``) how many collectives it has started and in which it waits.
Once a wait has lasted two seconds, its rank asks for the others' last collectives, finds out whether the wait can end
(:func:`_verdict`), and tells them, so all raise the same error. A rank that is only slow is waited for until the
group's timeout; a silent one, which may be stopped, counts as gone once a connection to it is broken as well.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hecate.runtime.comm import heartbeat, program
from hecate.runtime.comm.heartbeat import Heard, Heartbeat
from hecate.runtime.comm.history import (
    DisagreementError,
    as_plain,
    current_purpose,
    first_difference,
    from_plain,
    history_of,
    known_groups,
)

log = logging.getLogger("hecate")

# Seconds until a wait is told to the others, and until it is first logged; each next log comes after twice as long.
TOLD, FIRST = 2.0, 10.0
# Seconds that a rank may take to go on after an error in its forward: its program may have caught it.
PATIENCE = 5.0
# Heartbeats without news of a rank until it is called silent, and during which the reason of an error is looked for.
_SILENT, _LOOK = 3.5, 5.0
# Seconds that a rank which ends waits until its last entry is written.
_LAST_WORDS = 5.0
# Collectives that a rank tells in the store, where each waiting rank reads those of all; and the values of their
# splits.
_CALLS, _SPLITS = 64, 4096


class RankEndedError(RuntimeError):
    """Raised where a rank takes no part any more: its program has ended, or it is gone."""


@dataclass(frozen=True)
class Problem:
    """The reason why a group cannot go on: a disagreement, or a rank that failed, is gone, or has ``ended`` its part.

    If it is not ``certain``, the text is no more than what this rank saw.
    """

    text: str
    disagreement: bool = False
    certain: bool = True
    ended: bool = False

    def error_in(self, what: str) -> RuntimeError:
        """Return the error for a rank that was in the collective ``what``."""
        if self.disagreement:
            return DisagreementError(self.text)
        kind = RankEndedError if self.ended else RuntimeError
        return kind(f"hecate: {what} cannot end: {self.text}")


@dataclass(eq=False)
class Wait:
    """A thread's wait for other ranks in collective ``number`` of its group, or after it, in a ``meeting``.

    It is logged after ``next`` seconds; ``problem`` is why it will not end; a ``broken`` one has ended with an error.
    """

    what: str
    group: dist.ProcessGroup
    number: int
    meeting: bool
    since: float
    next: float = field(default_factory=lambda: FIRST)
    problem: Problem | None = None
    broken: bool = False

    def lacks(self, started: int) -> bool:
        """Tell whether it waits for a rank that has started ``started`` collectives of its group."""
        return started < self.number + self.meeting


_waits: dict[int, Wait] = {}
# Groups that cannot go on, each with the collective in which this rank noticed.
_given_up: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Problem, str]] = weakref.WeakKeyDictionary()
# Set once this rank has raised because of others. Its later errors may come from that, and are not told.
_consequence = False
_heartbeat: Heartbeat | None = None
_lock = threading.Lock()


def _running() -> Heartbeat:
    global _heartbeat
    if _heartbeat is None:
        with _lock:
            if _heartbeat is None:
                _heartbeat = Heartbeat(_entry, lambda: bool(_long_waits()), _look)
                atexit.register(_at_exit)
    return _heartbeat


def _look() -> None:
    for wait in list(_waits.values()):
        if wait in _long_waits() and wait.problem is None:
            wait.problem = _verdict(wait)
        seconds = time.monotonic() - wait.since
        if seconds >= wait.next:
            wait.next *= 2
            _log(wait, seconds)


@contextmanager
def watched(group: dist.ProcessGroup, what: str = "", *, meeting: bool = False) -> Iterator[Wait]:
    """Watch a wait for other ranks inside the block, in the words of ``what`` or ``history.doing``."""
    _running()
    thread = threading.get_ident()
    wait = Wait(what or current_purpose(), group, history_of(group).number, meeting, time.monotonic())
    _waits[thread] = wait
    try:
        yield wait
    finally:
        _waits.pop(thread, None)


def _long_waits() -> list[Wait]:
    return [wait for wait in list(_waits.values()) if wait.broken or time.monotonic() - wait.since >= TOLD]


def _entry(asked: bool) -> dict[str, Any]:
    """Return this rank's entry for the store, with its last collectives and program's place if another rank asked."""
    groups: dict[str, dict[str, Any]] = {}
    for group, history in known_groups():
        one = groups[history.group_name] = {"number": history.number}
        if asked:
            one["calls"] = as_plain(history.last(_CALLS), _SPLITS)
        if group in _given_up:
            one["problem"] = vars(_given_up[group][0])
    for wait in _long_waits():
        groups.setdefault(wait.group.group_name, {})["wait"] = {"what": wait.what, "number": wait.number}
    return {
        "groups": groups,
        "forwards": program.forwards(),
        # A wait on another thread may still come to the program's place.
        "place": program.told_place() if asked and not _waits else None,
        "failure": program.told_failure(),
    }


def _verdict(wait: Wait) -> Problem | None:
    """Return why a wait does not end, as far as that is known; None if it may be only slow."""
    group, history = wait.group, history_of(wait.group)
    numbers = dist.get_process_group_ranks(group)
    heard = _heard(group)
    told = {rank: one.entry.get("groups", {}).get(history.group_name, {}) for rank, one in heard.items()}
    for one in told.values():
        if one.get("problem", {}).get("certain"):
            return Problem(**one["problem"])
    calls = {numbers.index(rank): from_plain(one["calls"]) for rank, one in told.items() if "calls" in one}
    text = first_difference(calls | {group.rank(): history.last(_CALLS)}, numbers)
    if text is not None:
        return Problem(text, disagreement=True)
    for rank, entry in ((rank, one.entry) for rank, one in heard.items()):
        if entry.get("left"):
            return Problem(f"rank {rank} has ended torch.distributed (destroy_process_group)", ended=True)
        if _is_to_blame(entry.get("failure"), wait):
            return Problem(f"rank {rank} {entry['failure']['text']}", ended=entry["failure"]["final"])
        place = program.place_of(entry.get("place"))
        if place is not None and wait.lacks(told[rank].get("number", 0)) and place.misses_this_rank():
            passed = program.behind(entry["forwards"])
            return Problem(f"rank {rank} waits in {place.what}, which this rank has not called{passed}")
    gone = silent(group) if wait.broken else {}
    if not gone:
        return None
    names = f"rank {next(iter(gone))} has" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} have"
    them, seconds = "it was" if len(gone) == 1 else "they were", max(gone.values())
    return Problem(
        f"{names} not been heard of for {seconds:.0f} s: {them} killed, stopped, or cut off from the others",
        ended=True,
    )


def _is_to_blame(failure: Mapping[str, Any] | None, wait: Wait) -> bool:
    """Tell whether ``wait`` waits for a rank with this failure."""
    name = history_of(wait.group).group_name
    then = None if failure is None else failure["started"].get(name)
    # If this rank failed at the same point, all may have, and may all be about to try again.
    if failure is None or then is None or program.failed_at.get(name) == then:
        return False
    if failure["final"]:
        return wait.lacks(then)
    # A rank that failed and closed its connections will not come any more.
    return then < wait.number and (wait.broken or failure["seconds"] >= PATIENCE)


def reason(wait: Wait, error: BaseException) -> Problem:
    """Find out, in a few seconds, why a wait broke or ran into its timeout."""
    end, beat, wait.broken = time.monotonic() + _LOOK * heartbeat.EVERY, _running(), True
    beat.tell()
    while wait.problem is None and time.monotonic() < end:
        time.sleep(heartbeat.EVERY / 10)
    if wait.problem is not None:
        return wait.problem
    said, lost = program.first_line(error), time.monotonic() - beat.reached
    if lost > _SILENT * heartbeat.EVERY:
        where = os.environ.get("MASTER_ADDR", "another node")
        return Problem(
            f"the store of this run ({where}) has not answered for {lost:.0f} s: its node is gone, or cut off from "
            f"this one. {said}"
        )
    for rank, one in _heard(wait.group).items():
        told = one.entry.get("groups", {}).get(history_of(wait.group).group_name)
        if told is not None and wait.lacks(told["number"]):
            last = from_plain(told.get("calls", [])[-1:])
            after = f"; the last that it began is {last[0]}" if last else ""
            said += f"\nRank {rank} is alive but has not begun it{after}."
    return Problem(said, certain=False)


def silent(group: dist.ProcessGroup, *, unknown: bool = False) -> dict[int, float]:
    """Return the seconds for which ranks of ``group`` have told nothing, with those not known if ``unknown``."""
    found = {rank: _running().silence(rank) for rank in _others(group)}
    long = _SILENT * heartbeat.EVERY
    gone = [rank for rank, seconds in found.items() if (unknown if seconds is None else seconds > long)]
    return {rank: found[rank] or 0.0 for rank in gone}


def waits_beyond(group: dist.ProcessGroup) -> str | None:
    """Describe a rank that waits in a collective which this one has not begun; None if there is none."""
    for rank, one in _heard(group).items():
        told = one.entry.get("groups", {}).get(group.group_name, {}).get("wait")
        if told is not None and told["number"] > history_of(group).number:
            return f"rank {rank} waits in {told['what']}"
    return None


def _heard(group: dist.ProcessGroup) -> dict[int, Heard]:
    """Return the last entries of the others of ``group``, by rank."""
    return {rank: _running().heard[rank] for rank in _others(group) if rank in _running().heard}


def _others(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks of ``group``, by their numbers in the default group, which all texts name."""
    ranks = dist.get_process_group_ranks(group)
    return [rank for place, rank in enumerate(ranks) if place != group.rank()]


def refuse_if_given_up(group: dist.ProcessGroup) -> None:
    """Raise again the error that this rank raised on ``group``, if it did."""
    if group in _given_up:
        problem, what = _given_up[group]
        raise problem.error_in(what)


def give_up(wait: Wait, problem: Problem) -> None:
    """Refuse all further collectives of the group of ``wait``, and tell the others why."""
    global _consequence
    _consequence = True
    _given_up.setdefault(wait.group, (problem, wait.what))
    _running().tell()


@contextmanager
def telling(where: str) -> Iterator[None]:
    """Tell the others of an error that leaves the block, before they find this rank's connections closed."""
    program.going_on()
    try:
        yield
    except Exception as error:
        if _note_failure(error, where, final=False):
            _running().tell(_LAST_WORDS)
        raise


def _note_failure(error: BaseException | None, where: str, *, final: bool) -> bool:
    """Note an error, or the end of the program, and tell whether that is news."""
    # Errors that came from other ranks are known there. A process that was forked has no ranks to tell.
    known = (error is not None and _consequence) or (program.failure is not None and program.failure.final)
    groups = known_groups()
    if known or not groups or not dist.is_initialized() or os.getpid() != _running().process:
        return False
    started = {history.group_name: history.number for _, history in groups}
    program.note_failure(error, where, started, final=final)
    return True


def _at_exit() -> None:
    # Python keeps here the error that ends the program, if one does.
    error = getattr(sys, "last_value", None)
    with suppress(Exception):
        _note_failure(error, "and ended" if error is not None else "", final=True)
        _running().close(_LAST_WORDS)


def _log(wait: Wait, seconds: float) -> None:
    own, text = dist.get_rank(), "hecate: rank %d has waited for %.0f s in %s: %s. All ranks must call it together."
    others = [_state(rank, wait.group) for rank in dist.get_process_group_ranks(wait.group) if rank != own]
    log.warning(text, own, seconds, wait.what, "; ".join(others))


def _state(rank: int, group: dist.ProcessGroup) -> str:
    heard, seconds = _running().heard.get(rank, Heard()), _running().silence(rank) or 0.0
    if seconds > 5 * heartbeat.EVERY:
        return f"rank {rank} has not been heard of for {seconds:.0f} s"
    told = heard.entry.get("groups", {}).get(group.group_name, {})
    passed = program.behind(heard.entry.get("forwards", program.forwards()))
    if "wait" in told:
        return f"rank {rank} waits in {told['wait']['what']}{passed}"
    last = from_plain(told.get("calls", [])[-1:])
    return f"rank {rank} does not say that it waits" + (f", and began last {last[0]}" if last else "") + passed
