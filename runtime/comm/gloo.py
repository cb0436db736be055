"""What gloo does when a collective goes wrong, and how a rank gets out of it.

- It blocks its caller until the group's timeout. A collective that is waited for in rounds can be left.
- The process of a rank that left one would not end before that timeout either. So the group is cut off: its
  connections are closed, which ends what is on its way here and on its peers.
- A message cannot be waited for in rounds: the end of the first would cut the group off, and even to send one may
  block. A thread of its own does both, and is left behind with it, until the timeout. Of one that is half there
  gloo does not even say that its connection was closed, see :func:`check_connections`.
- A message that is longer than expected is an exception in a thread of gloo's own, which ends the process without a
  word. That thread is held until ranks have found out what happened, see :func:`hold_fatal_errors`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("hecate")

# How long one look at a collective takes, and how long a process that gloo wants to end is held for an explanation.
ROUND = timedelta(seconds=1)
_HELD = 20
# A tag that no message has, and that of messages which nobody reads. All others have lower ones.
_NOBODY, _PROBE = 2**31 - 1, 2**31 - 2


# By group, the kinds of device for which gloo carries what they have.
_devices: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries what is on ``device``."""
    found = _devices.get(group)
    if found is None:
        pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
        found = _devices[group] = {kind for kind, _, backend in pairs if backend == "gloo"}
    return device.type in found


def wait_in_rounds(work: Any, leave: Callable[[], None]) -> None:
    """Wait for a collective.

    Args:
        work: what torch.distributed returned when it was started.
        leave: called every second; raises to leave it.
    """
    while True:
        try:
            work.wait(ROUND)
            return
        except RuntimeError:
            # Whether it was the round that ended or the collective, only the collective knows.
            if work.is_completed():
                work.wait()
                return
        leave()


class Messages:
    """An exchange of messages; waited for like a collective of torch.distributed.

    Args:
        work: sends and receives them, and returns when that is done.

    Attributes:
        under_way: locked until all have left and come, or none will any more.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self.under_way = threading.Lock()
        self.under_way.acquire()

    def run(self) -> None:
        """In a thread that may be left in it."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            # Frames would keep what they send.
            self._error = error.with_traceback(None)
        finally:
            self._work = None
            self.under_way.release()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` returns or raises at once."""
        return not self.under_way.locked()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all have left and come.

        Raises:
            RuntimeError: not within ``timeout``; a connection was closed; or the group's timeout is over.
        """
        if not self.under_way.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
            raise RuntimeError("messages are still on their way")
        self.under_way.release()
        if self._error is not None:
            raise self._error


class _Messenger:
    """A thread that runs one exchange of messages after the other; it ends when this is let go."""

    def __init__(self) -> None:
        self._last: threading.Lock | None = None
        self._inbox: SimpleQueue[Messages | None] = SimpleQueue()
        # A daemon: it may be left in messages that never come.
        threading.Thread(target=_run, args=(self._inbox,), name="hecate-messages", daemon=True).start()
        weakref.finalize(self, self._inbox.put, None).atexit = False

    @property
    def is_left(self) -> bool:
        """Whether it is in an exchange that nobody waits for any more."""
        return self._last is not None and self._last.locked()

    def give(self, messages: Messages) -> None:
        # Not the messages: an error in them holds all frames that it goes through.
        self._last = messages.under_way
        self._inbox.put(messages)


def _run(inbox: SimpleQueue[Messages | None]) -> None:
    while (messages := inbox.get()) is not None:
        messages.run()
        # What they held goes with them, not with the next ones.
        del messages


class _Messengers(threading.local):
    """Of each thread that exchanges messages the one that does it for this thread."""

    own: _Messenger | None = None


_messengers = _Messengers()


def exchange(
    out: torch.Tensor,
    rows: torch.Tensor,
    receive: Sequence[int],
    send: Sequence[int],
    group: dist.ProcessGroup,
    number: int,
) -> Messages:
    """Start an all-to-all as messages, and none between ranks that have nothing for each other.

    All that comes is asked for before anything is sent. In gloo's own all-to-all a rank asks another for its rows
    behind those that it sends to it, on the same connection: a rank that comes late gets nothing until its own rows
    have left, so one link carries both directions one after the other. And there all ranks wait for all.

    Args:
        out: ``[sum(receive), ...]``, contiguous.
        rows: ``[sum(send), ...]``, contiguous.
        receive, send: rows from and to each rank, length W.
        number: of the collective in its group, so that no rank takes the rows of another one.

    Raises:
        RuntimeError: a rank sends itself another number of rows than it expects.
    """
    rank, inference = group.rank(), torch.is_inference_mode_enabled()
    if send[rank] != receive[rank]:
        raise RuntimeError(f"rank {rank} sends itself {send[rank]} rows and expects {receive[rank]}")
    coming, going = out.split(list(receive)), rows.split(list(send))

    def work() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            _exchange(coming, going, group, number % _PROBE)

    messages, own = Messages(work), _messengers.own
    if own is None or own.is_left:
        own = _messengers.own = _Messenger()
    own.give(messages)
    if send[rank]:
        coming[rank].copy_(going[rank])
    return messages


def _exchange(
    coming: Sequence[torch.Tensor], going: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int
) -> None:
    rank, size = group.rank(), group.size()
    # Not all ranks begin with the same one.
    turns = [(rank + turn) % size for turn in range(1, size)]
    works: list[Any] = []
    try:
        for other in reversed(turns):
            if len(coming[other]):
                works.append(group.recv([coming[other]], other, tag))
        for other in turns:
            if len(going[other]):
                works.append(group.send([going[other]], other, tag))
        for one in works:
            one.wait()
    except BaseException:
        # Their destructors wait for a thread of gloo that may be held below.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(works))
        raise


def check_connections(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Of a message that is half there gloo does not say when its connection is closed, but of one that begins.

    Args:
        ranks: of which nothing was heard for a while. One that is only slow gets a message that it never reads.

    Raises:
        RuntimeError: the connection to one of them is closed.
    """
    if not ranks:
        return
    errors: list[RuntimeError] = []
    # It may block as any message may.
    prober = threading.Thread(target=_probe, args=(group, ranks, errors), name="hecate-probe", daemon=True)
    prober.start()
    prober.join(ROUND.total_seconds())
    if errors:
        raise errors[0]


def _probe(group: dist.ProcessGroup, ranks: Sequence[int], errors: list[RuntimeError]) -> None:
    try:
        for other in ranks:
            work = group.send([torch.empty(0, device="cpu")], other, _PROBE)
            # Nobody waits for it, and its destructor may have to.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
    except RuntimeError as error:
        errors.append(error)


def cut_off(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``. What is on its way fails, here and on peers; nothing works afterwards.

    Messages of which a part has come or left stay until the group's timeout.
    """
    # Its destructor waits for its threads, and one may be held below.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    threading.Thread(target=_cut_off, args=(group,), name="hecate-cut-off", daemon=True).start()


def _cut_off(group: dist.ProcessGroup) -> None:
    # A receive that times out closes all connections of its group; gloo has no other way.
    peer = (group.rank() + 1) % group.size()
    with suppress(Exception):
        group.recv([torch.empty(1, device="cpu")], peer, _NOBODY).wait(timedelta(milliseconds=1))


def hold_fatal_errors(explained: Callable[[], int]) -> None:
    """From now on, an exception that nobody catches in a thread of gloo's is held back for a while.

    Args:
        explained: how often this rank has raised an error that says why a collective cannot end. If it does so
            meanwhile, the process ends as its program decides; if not, as gloo wants.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        # It brings the C library along.
        _hold(ctypes.CDLL("libstdc++.so.6"), explained)


_handler_type = ctypes.CFUNCTYPE(None)
# What C++ calls must stay alive.
_kept: list[Any] = []


def _hold(library: Any, explained: Callable[[], int]) -> None:
    set_terminate, exception_type = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
    set_terminate.restype = exception_type.restype = ctypes.c_void_p
    set_terminate.argtypes = [_handler_type]

    def ended() -> None:
        with suppress(Exception):
            found = exception_type()
            # The second word of a type_info is its name.
            name = ctypes.string_at(ctypes.c_void_p.from_address(found + 8).value or 0) if found else b""
            if b"gloo" in name:
                log.error(
                    "hecate: gloo wants to end this process, as it does when a message is longer than expected. "
                    "It is held for %d s so that ranks can find out which.", _HELD,
                )  # fmt: skip
                # In C: a thread of C++ that came back to an interpreter that has ended in the meantime would crash.
                already = explained()
                library.sleep(_HELD)
                while explained() > already:
                    library.sleep(2**31 - 1)
        before()

    handler = _handler_type(ended)
    previous = set_terminate(handler)
    before = _handler_type(previous) if previous else _handler_type(lambda: None)
    _kept.extend((handler, before))
