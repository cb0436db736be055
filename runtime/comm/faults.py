"""Who broke a collective: found out from what ranks tell of themselves, and told to those that wait.

A rank that fails tells it before its connections close (:mod:`hecate.runtime.comm.failures`), one that dies falls
silent, and one that does something else is found by comparing what all of them have started. What one rank finds it
tells, so all raise the same.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hecate.runtime.comm import bulletin as bulletins
from hecate.runtime.comm import failures, program
from hecate.runtime.comm.bulletin import Heard, add_part, bulletin
from hecate.runtime.comm.desync import DisagreementError, first_difference
from hecate.runtime.comm.history import as_plain, from_plain, history_of, known_groups

# Rounds of the bulletin that a rank looks for the reason of a broken connection, and without news of another rank
# after which that one is called silent.
_LOOK = 5.0
_SILENT = 3.5
# Seconds that a rank may take to go on after an error in its forward: its program may have caught it.
PATIENCE = 5.0
# Collectives that a rank tells in the store, where each waiting rank reads those of all; and their splits, in values.
_CALLS = 64
_SPLITS = 4096


class RankEndedError(RuntimeError):
    """A rank takes no part any more: its program has ended, or it is gone."""


@dataclass(frozen=True)
class Problem:
    """Why a group cannot go on.

    Attributes:
        disagreement: ranks do different things; else one failed or is gone.
        certain: what happened is known. If not, the text is no more than what this rank saw.
        ended: a rank takes no part any more.
    """

    text: str
    disagreement: bool = False
    certain: bool = True
    ended: bool = False

    def error_in(self, what: str) -> RuntimeError:
        """What a rank raises that was in the collective ``what``."""
        if self.disagreement:
            return DisagreementError(self.text)
        kind = RankEndedError if self.ended else RuntimeError
        return kind(f"hecate: {what} cannot end: {self.text}")


@dataclass(frozen=True)
class _GivenUp:
    """A group that cannot go on, and the collective in which this rank noticed."""

    problem: Problem
    what: str


_given_up: weakref.WeakKeyDictionary[dist.ProcessGroup, _GivenUp] = weakref.WeakKeyDictionary()


def refuse_if_given_up(group: dist.ProcessGroup) -> None:
    """Raise what this rank raised before on ``group``, if it did."""
    found = _given_up.get(group)
    if found is not None:
        raise found.problem.error_in(found.what)


def give_up(group: dist.ProcessGroup, problem: Problem, what: str) -> None:
    """Refuse all further collectives of ``group``, and tell the others why.

    Args:
        what: the collective that this rank was in.
    """
    if group not in _given_up:
        _given_up[group] = _GivenUp(problem, what)
        failures.note_consequence()
    bulletin().tell()


def verdict(group: dist.ProcessGroup, patience: float | None = None) -> Problem | None:
    """What is known of why a collective of ``group`` does not end; None if it may be only slow.

    Args:
        patience: seconds that a rank may take to go on after an error, if not ``PATIENCE``.
    """
    name, history, patience = group.group_name, history_of(group), PATIENCE if patience is None else patience
    heard = _heard(group)
    told = {rank: one.entry.get("groups", {}).get(name, {}) for rank, one in heard.items()}
    problems = [Problem(**one["problem"]) for one in told.values() if one.get("problem")]
    found = next((problem for problem in problems if problem.certain), None)
    if found is not None:
        return found
    calls = {rank: from_plain(one["calls"]) for rank, one in told.items() if "calls" in one}
    text = first_difference(calls | {group.rank(): history.last(_CALLS)})
    if text is not None:
        return Problem(text, disagreement=True)
    for rank, one in heard.items():
        if one.entry.get("left"):
            return Problem(f"rank {rank} has ended torch.distributed (destroy_process_group)", ended=True)
        failure = one.entry.get("failure")
        if failure is not None and _to_blame(failure, name, history.number, patience):
            return Problem(f"rank {rank} {failure['text']}", ended=failure["final"])
        place = program.place_of(one.entry.get("place"))
        if place is not None and told[rank].get("number", 0) < history.number and place.misses_this_rank():
            passed = program.behind(one.entry["forwards"])
            return Problem(f"rank {rank} waits in {place.what}, which this rank has not called{passed}")
    return None


def _to_blame(failure: Mapping[str, Any], name: str, number: int, patience: float) -> bool:
    """Whether a rank that waits in collective ``number`` waits for one with this failure."""
    then = failure["started"].get(name)
    # If this rank failed at the same point, all may have, and may all be about to try again.
    waited_for = then is not None and then < number and failures.failed_at(name) != then
    return waited_for and (failure["final"] or failure["seconds"] >= patience)


def reason(group: dist.ProcessGroup, error: BaseException) -> Problem:
    """Why a collective of ``group`` broke, or ran into its timeout. Takes a few seconds to find out."""
    end = time.monotonic() + _LOOK * bulletins.EVERY
    bulletin().listen()
    bulletin().tell(bulletins.EVERY)
    while True:
        # Of a rank that failed, and closed its connections, there is nothing more to wait for.
        found = verdict(group, patience=0) or _gone(group)
        if found is not None:
            return found
        if time.monotonic() > end:
            break
        bulletin().listen()
        time.sleep(bulletins.EVERY / 10)
    lost = time.monotonic() - bulletin().reached
    if lost > _SILENT * bulletins.EVERY:
        where = os.environ.get("MASTER_ADDR", "another node")
        return Problem(
            f"the store of this run ({where}) has not answered for {lost:.0f} s: its node is gone, or cut off from "
            f"this one. {failures.first_line(error)}"
        )
    return Problem(f"{failures.first_line(error)}{_late(group)}", certain=False)


def unheard(group: dist.ProcessGroup) -> list[int]:
    """The ranks of ``group`` that may be gone: they have told nothing for a while, or it cannot be known."""
    return [
        rank for rank, seconds in _silence(group).items() if seconds is None or seconds > _SILENT * bulletins.EVERY
    ]


def _silence(group: dist.ProcessGroup) -> dict[int, float | None]:
    return {rank: bulletin().silence(other) for rank, other in _others(group)}


def _gone(group: dist.ProcessGroup) -> Problem | None:
    found = _silence(group).items()
    gone = {rank: seconds for rank, seconds in found if seconds is not None and seconds > _SILENT * bulletins.EVERY}
    if not gone:
        return None
    names = f"rank {next(iter(gone))} has" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} have"
    them, seconds = "it was" if len(gone) == 1 else "they were", max(gone.values())
    return Problem(
        f"{names} not been heard of for {seconds:.0f} s: {them} killed, stopped, or cut off from the others",
        ended=True,
    )


def _late(group: dist.ProcessGroup) -> str:
    """Ranks that are alive, and have not come."""
    number, name, lines = history_of(group).number, group.group_name, []
    for rank, one in _heard(group).items():
        told = one.entry.get("groups", {}).get(name)
        if told is not None and told["number"] < number:
            last = from_plain(told["calls"])[-1:] if "calls" in told else []
            after = f"; the last that it began is {last[0]}" if last else ""
            lines.append(f"\nRank {rank} is alive but has not begun it{after}.")
    return "".join(lines)


def _heard(group: dist.ProcessGroup) -> dict[int, Heard]:
    """What the others of ``group`` told, by rank in it."""
    heard = bulletin().heard
    return {rank: heard[other] for rank, other in _others(group) if other in heard}


def _others(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """The other ranks of ``group``: in it, and in the default group."""
    ranks = enumerate(dist.get_process_group_ranks(group))
    return [(rank, other) for rank, other in ranks if rank != group.rank()]


def _told(asked: bool) -> dict[str, Any]:
    groups = {}
    for group, history in known_groups():
        given_up = _given_up.get(group)
        groups[history.group_name] = {
            "number": history.number,
            **({"calls": as_plain(history.last(_CALLS), _SPLITS)} if asked else {}),
            **({"problem": vars(given_up.problem)} if given_up is not None else {}),
        }
    return {"groups": groups}


add_part(_told)
