"""Collectives over gloo, as messages between pairs of ranks.

A message's tag is a hash of its length and of all collectives that its rank has started on the group. So ranks that
do different things never take each other's messages: they wait until it is found out (``supervise``). Gloo's own
collectives would take a shorter message for the whole, and end the process at a longer one.

- A rank posts all its receives before it sends; ranks that have nothing for each other send no message. In gloo's own
  all-to-all a late rank gets nothing until its own rows have left, and all ranks wait for all.
- A message cannot be waited for in rounds: the end of the first would close all connections of the group. A thread of
  its own waits, and is left with messages that do not come, until the group's timeout.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hecate.runtime.comm.start import backends_of

# Seconds that a look at connections takes.
_LOOK = 1.0
# Bytes of a rank up to which gloo's own collective gathers them.
FEW = 2**10
# The tag that no message has, and that of messages which no rank reads. All others are lower.
_NOBODY, _PROBE = 2**31 - 1, 2**31 - 2
# Odd, so that messages of different lengths have different tags.
_FACTOR = 0x9E3779B1


# Whether gloo carries tensors of the host, by group.
_carried: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether ``group`` sends tensors on ``device`` as messages over gloo."""
    found = _carried.get(group)
    if found is None:
        found = _carried[group] = backends_of(group).get("cpu") == "gloo"
    return found and device.type == "cpu"


class Awaited(Protocol):
    """A collective over gloo that is under way."""

    def wait(self, seconds: float = -1) -> bool:
        """Tell whether it is done within ``seconds``; RuntimeError if a connection closed or the group timed out."""


class Messages:
    """Messages that ``work`` sends and receives; ``under_way`` is locked until all are done, or have failed."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self.under_way = threading.Lock()
        self.under_way.acquire()

    def run(self) -> None:
        """Send and receive, on a thread that may never come back from it."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            # The traceback's frames would keep the tensors that were sent.
            self._error = error.with_traceback(None)
        finally:
            self._work = None
            self.under_way.release()

    def wait(self, seconds: float = -1) -> bool:
        """Wait as :meth:`Awaited.wait` does."""
        if not self.under_way.acquire(timeout=seconds):
            return False
        self.under_way.release()
        if self._error is not None:
            raise self._error
        return True


class _Messenger:
    """A thread that runs one exchange of messages after the other; it ends when this object is let go."""

    def __init__(self) -> None:
        self._last: threading.Lock | None = None
        self._inbox: SimpleQueue[Messages | None] = SimpleQueue()
        # A daemon: it may be left in messages that never come.
        threading.Thread(target=_run, args=(self._inbox,), name="hecate-messages", daemon=True).start()
        weakref.finalize(self, self._inbox.put, None).atexit = False

    @property
    def is_left(self) -> bool:
        """Tell whether its thread is still in an exchange that no caller waits for any more."""
        return self._last is not None and self._last.locked()

    def give(self, messages: Messages) -> None:
        # Keeps the lock and not the messages: an error in them holds all frames that it goes through.
        self._last = messages.under_way
        self._inbox.put(messages)


def _run(inbox: SimpleQueue[Messages | None]) -> None:
    while (messages := inbox.get()) is not None:
        messages.run()
        # Their tensors are freed now, and not when the next messages come.
        del messages


class _Messengers(threading.local):
    """The messenger of each thread that exchanges messages."""

    own: _Messenger | None = None


_messengers = _Messengers()


def exchange(
    coming: Sequence[torch.Tensor], going: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int
) -> Messages:
    """Start to send ``going[w]`` to each rank w, and to receive ``coming[w]``; all contiguous, empty for nothing.

    ``tag`` is equal on all ranks in this collective, and in no other. Raises RuntimeError if a rank's rows for itself
    are not as many as it expects.
    """
    rank, inference = group.rank(), torch.is_inference_mode_enabled()
    if len(coming[rank]) != len(going[rank]):
        raise RuntimeError(f"rank {rank} sends itself {len(going[rank])} rows and expects {len(coming[rank])}")

    def work() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            _exchange(coming, going, group, tag)

    messages, own = Messages(work), _messengers.own
    if own is None or own.is_left:
        own = _messengers.own = _Messenger()
    own.give(messages)
    if len(going[rank]) and coming[rank] is not going[rank]:
        coming[rank].copy_(going[rank])
    return messages


def _exchange(
    coming: Sequence[torch.Tensor], going: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int
) -> None:
    rank, size = group.rank(), group.size()
    # Ranks begin with different peers, so that none gets the messages of all at once.
    turns = [(rank + turn) % size for turn in range(1, size)]
    works: list[Any] = []
    for other in reversed(turns):
        if len(coming[other]):
            works.append(group.recv([coming[other]], other, _tag(tag, coming[other])))
    for other in turns:
        if len(going[other]):
            works.append(group.send([going[other]], other, _tag(tag, going[other])))
    for one in works:
        one.wait()


def _tag(tag: int, tensor: torch.Tensor) -> int:
    return (tag ^ (tensor.nbytes * _FACTOR)) % _PROBE


class Few:
    """A gather of at most :data:`FEW` bytes by gloo's own all-to-all, tags in front; it takes no Python thread.

    ``flat`` has as many bytes on all ranks, ``out`` W times as many.
    """

    def __init__(self, flat: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
        size, line = group.size(), torch.zeros(8 + FEW, dtype=torch.uint8, device="cpu")
        line[:8].view(torch.int64).fill_(tag)
        line[8 : 8 + flat.nbytes] = flat.view(torch.uint8)
        self._out, self._tag = out.view(torch.uint8).view(size, -1), tag
        self._lines, lines = line.new_empty((size, 8 + FEW)), line.expand(size, -1).contiguous()
        self._work: Any = dist.all_to_all_single(self._lines, lines, group=group, async_op=True)

    def wait(self, seconds: float = -1) -> bool:
        """Wait as :meth:`Awaited.wait` does; raises a RuntimeError as well if a rank is in another collective."""
        try:
            self._work.wait(timedelta(seconds=seconds)) if seconds >= 0 else self._work.wait()
        except RuntimeError:
            # The error does not say whether the time is over or the collective broke; only the collective knows.
            if not self._work.is_completed():
                return False
            self._work.wait()
        if (self._lines[:, :8].contiguous().view(torch.int64) != self._tag).any():
            raise RuntimeError("ranks are in different collectives")
        self._out.copy_(self._lines[:, 8 : 8 + self._out.shape[1]])
        return True


def cut_off(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``: its messages fail, here and on peers, so no process waits for a timeout."""

    def close() -> None:
        # A receive that times out closes all connections of its group; gloo has no other way.
        peer = (group.rank() + 1) % group.size()
        with suppress(Exception):
            group.recv([torch.empty(1, device="cpu")], peer, _NOBODY).wait(timedelta(milliseconds=1))

    threading.Thread(target=close, name="hecate-cut-off", daemon=True).start()


def check_connections(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Raise RuntimeError if a connection to one of ``ranks``, which told nothing for a while, is closed.

    When a connection closes, gloo fails a message that begins, but not one that is half there; so this begins one. A
    rank that is only slow gets a message that it never reads.
    """
    if not ranks:
        return
    errors: list[RuntimeError] = []

    def probe() -> None:
        try:
            for other in ranks:
                group.send([torch.empty(0, device="cpu")], other, _PROBE)
        except RuntimeError as error:
            errors.append(error)

    # Sending may block, as with any message.
    prober = threading.Thread(target=probe, name="hecate-probe", daemon=True)
    prober.start()
    prober.join(_LOOK)
    if errors:
        raise errors[0]
