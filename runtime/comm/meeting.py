"""Meetings: before a call that users may make on one rank alone, a rank waits in the store for the others."""

from __future__ import annotations

import time
from collections import Counter

import torch.distributed as dist

from hecate.runtime.comm.start import store_of, timeout_of
from hecate.runtime.comm.watch import waits_beyond, watched

# The number of meetings that this rank has come to, by the group's name.
_met: Counter[str] = Counter()
_TOGETHER = "It communicates: call it on all ranks together, not under `if rank == 0`, and write the result on one."


def meet(what: str, group: dist.ProcessGroup, *, advice: str = _TOGETHER) -> None:
    """Wait until all ranks of ``group`` are here, with none of their collectives under way.

    Raises RuntimeError, which names ``what`` they were to do and ends with ``advice``, if a rank waits in something
    else, has failed, or does not come before the group's timeout.
    """
    store, own, name = store_of(group), dist.get_rank(), group.group_name
    ranks = dist.get_process_group_ranks(group)
    _met[name] += 1
    keys = {rank: f"hecate/meeting/{name}/{_met[name]}/{rank}" for rank in ranks}
    store.set(keys[own], what)
    pause, end = 0.001, time.monotonic() + timeout_of(group)
    with watched(group, what, meeting=True) as wait:
        while not store.check(list(keys.values())):
            problem = waits_beyond(group)
            if problem is None and wait.problem is not None:
                raise wait.problem.error_in(what)
            if problem is None and time.monotonic() > end:
                missing = [rank for rank in ranks if not store.check([keys[rank]])]
                problem = f"ranks {missing} did not come before the group's timeout"
            # Once all have come, a rank may already have gone on after the meeting.
            if problem is not None and not store.check(list(keys.values())):
                # This rank takes back that it came: it may come later, with all others.
                store.delete_key(keys[own])
                _met[name] -= 1
                raise RuntimeError(f"hecate: {what} on rank {own}, but {problem}. {advice}")
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
    for rank in ranks:
        other = store.get(keys[rank]).decode()
        if other != what:
            raise RuntimeError(f"hecate: {what} on rank {own}, but rank {rank} calls {other}. {advice}")
    # All ranks have left the meeting before this one.
    store.delete_key(f"hecate/meeting/{name}/{_met[name] - 1}/{own}")
