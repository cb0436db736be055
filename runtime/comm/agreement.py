"""Checks and meetings of ranks that are about to do the same thing, before a difference becomes a hang.

Texts travel as bytes in tensors, never as pickled objects.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import DisagreementError, as_plain, doing, first_difference, from_plain, history_of
from hecate.runtime.comm.start import store_of, timeout_of
from hecate.runtime.comm.watch import waits_beyond, watched
from hecate.runtime.comm.world import World

__all__ = ["DisagreementError", "agree", "compare_histories", "gather_json", "meet"]


# Stands for the digest of a rank that does not know its own.
_NO_DIGEST = bytes(32)
# Numbers of splits in a report of a rank, and of all, which every rank gathers. The newest do, since the next
# exchange notices where ranks part.
_SPLITS, _SPLITS_OF_ALL = 2**20, 2**24


def agree(lines: Sequence[str] | None, what: str, advice: str, world: World) -> None:
    """Raise on all ranks if ``lines`` differ between ranks. A collective; costs one digest when they agree.

    Args:
        lines: the description to compare, one fact per line; None on a rank that does not know and is not asked.
        what: what is compared, for the message ("the model", "graph 0").
        advice: what to do about a difference.

    Raises:
        DisagreementError: names the ranks and the first line that differs.
    """
    if world.group is None:
        return
    # Collectives of a graph that are still under way must not mix with these.
    world.queue.drain()
    with doing(f"the comparison of {what}"):
        mine = list(lines) if lines is not None else ["(not known)"]
        digest = hashlib.sha256("\n".join(mine).encode()).digest() if lines is not None else _NO_DIGEST
        if len({*_gather(digest, 32, world)} - {_NO_DIGEST}) <= 1:
            return
        everyone = gather_json(mine, world)
    raise DisagreementError(f"hecate: ranks disagree on {what}.\n{_first_difference(everyone, world)}\n{advice}")


def compare_histories(world: World) -> None:
    """Raise DisagreementError with the first collective in which ranks are known to differ; a collective."""
    assert world.group is not None, "one rank has nobody to differ from"
    mine = as_plain(history_of(world.group).calls, splits=min(_SPLITS, _SPLITS_OF_ALL // world.size))
    world.queue.drain()
    with doing("the comparison of collectives"):
        calls = {rank: from_plain(found) for rank, found in enumerate(gather_json(mine, world))}
    raise DisagreementError(
        first_difference(calls, world.numbers)
        or "hecate: ranks disagree on collectives that lie further back than what they remember of them."
    )


def gather_json(value: Any, world: World) -> list[Any]:
    """Return the JSON data of every rank, in rank order. A collective."""
    text = json.dumps(value).encode()
    lengths = [int.from_bytes(raw, "little") for raw in _gather(len(text).to_bytes(8, "little"), 8, world)]
    texts = _gather(text, max(lengths), world)
    return [json.loads(raw[:length]) for raw, length in zip(texts, lengths, strict=True)]


def _gather(payload: bytes, length: int, world: World) -> list[bytes]:
    device = world.control_device
    mine = torch.zeros(length, dtype=torch.uint8, device="cpu")
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return [bytes(line) for line in collectives.all_gather_even(mine.to(device), world).tolist()]


def _first_difference(everyone: list[list[str]], world: World) -> str:
    numbers = world.numbers or range(world.size)
    for index, at in enumerate(zip_longest(*everyone, fillvalue="(nothing)")):
        if len(set(at)) > 1:
            return "\n".join(f"  rank {rank}, line {index}: {line}" for rank, line in zip(numbers, at, strict=True))
    return "  (the texts are equal; the digests are not)"


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
