"""Supervised collectives: each ends, with its result, or with an error that says which rank broke it and how."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from hecate.runtime.comm import program
from hecate.runtime.comm.history import current_label, history_of
from hecate.runtime.comm.messages import Awaited, carries, check_connections, cut_off
from hecate.runtime.comm.start import timeout_of
from hecate.runtime.comm.watch import Wait, give_up, reason, refuse_if_given_up, silent, watched

# Seconds between two looks at a wait.
ROUND = 1.0
# Seconds of a wait after which connections to silent ranks are checked.
_PATIENT = 4.0
_HOST = torch.device("cpu")
# For a wait for the device: seconds in which the host only asks, and the shortest and the longest time that it
# sleeps.
_BUSY, _SHORTEST, _LONGEST = 2e-4, 5e-5, 1e-2
# Seconds before a group's timeout, and the part of it, in which this rank finds out who is late, and in what. After
# the timeout NCCL's watchdog would end the process without saying so.
_EARLY, _PART = 10.0, 0.1


def supervised(
    kind: str,
    start: Callable[[int], Awaited | None],
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
) -> None:
    """Run one collective of ``group``; return when it is done, or launched where the host does not wait.

    ``start`` gets a tag that is equal on all ranks in the same collective and in no other, and returns the work to
    wait for over gloo. ``kind`` and ``splits`` are as in :class:`~hecate.runtime.comm.history.Call`.

    Raises:
        DisagreementError: ranks are in different collectives, or one sends what the other does not expect.
        RuntimeError: a rank failed, or is gone; or the group's timeout is over.
    """
    begin(kind, tensor, group, splits)
    with watched(group, current_label()) as wait:
        try:
            awaited = start(history_of(group).order)
            while awaited is not None and not awaited.wait(ROUND):
                _leave(wait)
        except RuntimeError as error:
            end = cut_off if carries(group, _HOST) else None
            raise _broken(wait, error, end) from (None if isinstance(error, _Left) else error)
        except BaseException:
            # Interrupted: messages under way would keep the process from ending.
            if carries(group, _HOST):
                cut_off(group)
            raise


def wait_for_device(ended: Callable[[], bool], group: dist.ProcessGroup) -> None:
    """Let the host wait until ``ended()``, which does not block, and raise as :func:`supervised` does."""
    if ended():
        return
    with watched(group, current_label()) as wait:
        try:
            _poll(ended, wait)
        except RuntimeError as error:
            raise _broken(wait, error, _abort) from (None if isinstance(error, _Left) else error)


def _poll(ended: Callable[[], bool], wait: Wait) -> None:
    timeout, looked = timeout_of(wait.group), wait.since
    longest = timeout - min(max(_EARLY, _PART * timeout), timeout / 2)
    while not ended():
        now = time.monotonic()
        waited = now - wait.since
        if now - looked > ROUND:
            looked = now
            _leave(wait)
            if waited > longest:
                raise RuntimeError(f"not done after {waited:.0f} s of the group's timeout of {timeout:.0f} s")
        if waited > _BUSY:
            # Sleeping a twentieth of the wait delays it unnoticed, and lets other threads run.
            time.sleep(min(max(waited / 20, _SHORTEST), _LONGEST))


def begin(
    kind: str,
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
) -> None:
    """Record that this rank begins a collective of all ranks of ``group``; RuntimeError if the group was given up."""
    refuse_if_given_up(group)
    program.going_on()
    history_of(group).add(kind, tensor, splits)


@contextmanager
def supervised_waits(group: dist.ProcessGroup) -> Iterator[Callable[[], bool]]:
    """Supervise waits of the host in the block, after :func:`begin`; yields a function that says to leave them.

    Raises as :func:`supervised` does, in place of a RuntimeError of the block.
    """
    with watched(group, current_label()) as wait:
        try:
            yield lambda: wait.problem is not None
        except RuntimeError as error:
            raise _broken(wait, error) from error


def _broken(wait: Wait, error: RuntimeError, end: Callable[[dist.ProcessGroup], None] | None = None) -> RuntimeError:
    """Give up the group of a wait that ``error`` ends, end its work, and return the error to raise in its place."""
    problem = wait.problem or reason(wait, error)
    give_up(wait, problem)
    if end is not None:
        end(wait.group)
    return problem.error_in(wait.what)


def _abort(group: dist.ProcessGroup) -> None:
    """End NCCL's kernels, which would otherwise hold up the device, and the process's end, for ever."""

    def abort() -> None:
        with suppress(Exception):
            group.abort()

    threading.Thread(target=abort, name="hecate-abort", daemon=True).start()


class _Left(RuntimeError):
    """Raised to leave a collective that will not end."""


def _leave(wait: Wait) -> None:
    if wait.problem is not None:
        raise _Left
    # After so long a wait, this rank has heard of the others. A group of NCCL alone has no connections of gloo's.
    if time.monotonic() - wait.since > _PATIENT and carries(wait.group, _HOST):
        ranks = dist.get_process_group_ranks(wait.group)
        check_connections(wait.group, [ranks.index(rank) for rank in silent(wait.group, unknown=True)])
