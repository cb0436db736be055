"""What gloo does when a collective goes wrong, and how a rank gets out of it.

- It blocks its caller until the group's timeout. A collective that is waited for in rounds can be left.
- The process of a rank that left one would not end before that timeout either. So the group is cut off: its
  connections are closed, which ends what is on its way here and on its peers.
- A message that is longer than expected is an exception in a thread of gloo's own, which ends the process without a
  word. That thread is held until ranks have found out what happened, see :func:`hold_fatal_errors`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("hecate")

# How long one look at a collective takes, and how long a process that gloo wants to end is held for an explanation.
ROUND = timedelta(seconds=1)
_HELD = 20
# A tag that no message has.
_NOBODY = 2**31 - 1


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


def cut_off(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``. What is on its way fails, here and on peers; nothing works afterwards."""
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
