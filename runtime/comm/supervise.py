"""Run a collective so that it ends: with its result, or with an error that says which rank broke it and how."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hecate.runtime.comm import failures, faults, gloo
from hecate.runtime.comm.history import current_label, history_of
from hecate.runtime.comm.waiting import Wait, watched

# Seconds of a wait after which connections to ranks that tell nothing are looked at.
_PATIENT = 4.0


def supervised(
    kind: str,
    start: Callable[[bool], Any],
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
) -> None:
    """Run one collective of ``group``; returns when it is done, or launched where the host does not wait.

    Args:
        kind: what it is called in ``torch.distributed``: "all_to_all".
        start: begins it; gets ``async_op``.
        tensor: what is communicated.
        splits: rows to and from each rank, of an all-to-all.

    Raises:
        DisagreementError: ranks are in different collectives, or one sends what the other does not expect.
        RuntimeError: a rank failed, or is gone; or the group's timeout is over.
    """
    begin(kind, tensor, group, splits)
    with watched(group, current_label()) as wait:
        if not gloo.carries(group, tensor.device):
            start(False)
            return
        try:
            gloo.wait_in_rounds(start(True), lambda: _leave(wait))
        except RuntimeError as error:
            problem = wait.problem or faults.reason(group, error)
            faults.give_up(group, problem, wait.what)
            gloo.cut_off(group)
            raise problem.error_in(wait.what) from (None if isinstance(error, _Left) else error)
        except BaseException:
            # Interrupted. What is on its way would keep the process from ending.
            gloo.cut_off(group)
            raise


def begin(
    kind: str,
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
) -> None:
    """This rank begins something that all ranks of ``group`` take part in; arguments as for :func:`supervised`.

    Raises:
        RuntimeError: the group was given up.
    """
    faults.refuse_if_given_up(group)
    failures.going_on()
    history_of(group).add(kind, tensor, splits)


@contextmanager
def supervised_waits(group: dist.ProcessGroup) -> Iterator[Callable[[], bool]]:
    """Around waits of the host that :func:`begin` has announced and torch knows nothing of.

    Yields:
        What tells that they are to be left, because they will not end.

    Raises:
        DisagreementError, RuntimeError: as :func:`supervised`, in place of a RuntimeError of the block.
    """
    with watched(group, current_label()) as wait:
        try:
            yield lambda: wait.problem is not None
        except RuntimeError as error:
            problem = wait.problem or faults.reason(group, error)
            faults.give_up(group, problem, wait.what)
            raise problem.error_in(wait.what) from error


class _Left(RuntimeError):
    """A collective that will not end is left."""


def _leave(wait: Wait) -> None:
    if wait.problem is not None:
        raise _Left
    # Whoever waits for so long has heard of the others by then.
    if time.monotonic() - wait.since > _PATIENT:
        gloo.check_connections(wait.group, faults.unheard(wait.group))
