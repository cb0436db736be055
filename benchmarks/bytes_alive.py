"""Every tensor that operators return, from when it is there to when its memory is let go of.

A dispatch mode sees the operators of the thread that it is in, and a mode does not go through ``torch.compile``. So a
:class:`Ledger` is fed by several: inside the compiled graphs (with ``aot_eager`` each operator is called), outside of
them, and in the thread in which collectives run. Operators of ``hecate`` are looked into: what they make on the way,
such as a copy of the rows that are sent, counts too. What kernels take inside themselves is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("activations", "gathered", "gradients")


@dataclass(kw_only=True)
class _Entry:
    """Memory, alive from one moment to before another."""

    reference: StorageWeakRef
    size: int
    born: int
    died: int | None = None
    kind: str = "activations"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes beside the states of a model and an optimizer.

    Attributes:
        all: the most of everything at one time.
        gradients, gathered, activations: of that, gradients of parameters; replicas and gathered parameters; and all
            else.
        most_activations: the most of activations, whenever that is.
    """

    all: int
    gradients: int
    gathered: int
    activations: int
    most_activations: int


class Ledger:
    """Memory that operators returned since this began, without what was there before.

    Args:
        known: tensors whose memory is not counted: parameters and states.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {_key(tensor) for tensor in known}
        self._alive: dict[int, _Entry] = {}
        self._entries: list[_Entry] = []
        self._time = 0
        self._lock = threading.Lock()

    def note(self, result: Any, kind: str = "activations") -> None:
        """An operator returned ``result``."""
        with self._lock:
            self._sweep()
            for tensor in tree_leaves(result):
                if not isinstance(tensor, torch.Tensor):
                    continue
                key = _key(tensor)
                if key in self._known:
                    continue
                storage = tensor.untyped_storage()
                entry = self._alive.get(key)
                if entry is None:
                    entry = _Entry(reference=StorageWeakRef(storage), size=storage.nbytes(), born=self._time)
                    self._alive[key] = entry
                    self._entries.append(entry)
                if kind != "activations":
                    entry.kind = kind

    def call(self) -> None:
        """An operator is about to be called: what is gone by now makes room."""
        with self._lock:
            self._sweep()

    def name(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """What these are, from the beginning."""
        with self._lock:
            for tensor in tensors:
                if tensor is not None and _key(tensor) in self._alive:
                    self._alive[_key(tensor)].kind = kind

    def peak(self) -> Peak:
        """Over all moments so far."""
        alive = {kind: [0] * (self._time + 2) for kind in KINDS}
        for entry in self._entries:
            alive[entry.kind][entry.born] += entry.size
            if entry.died is not None:
                alive[entry.kind][entry.died] -= entry.size
        now, best, most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), 0
        for moment in range(self._time + 1):
            for kind in KINDS:
                now[kind] += alive[kind][moment]
            if sum(now.values()) > sum(best.values()):
                best = dict(now)
            most = max(most, now["activations"])
        return Peak(all=sum(best.values()), most_activations=most, **best)

    def _sweep(self) -> None:
        self._time += 1
        for key in [key for key, entry in self._alive.items() if entry.reference.expired()]:
            self._alive.pop(key).died = self._time


class Watch(TorchDispatchMode):
    """Tells the ledger about the operators of one thread."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ledger.call()
        if func.namespace == "hecate":
            # Below this mode, but with it on for what the kernel calls.
            with Watch(self._ledger):
                out = func.redispatch(_KERNEL, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        self._ledger.note(out, "gathered" if _gathers(func) else "activations")
        return out


_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Watching:
    """A compiled graph whose operators a ledger hears of while there is one."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self._here = threading.local()

    @contextmanager
    def compiled_graphs(self) -> Iterator[None]:
        """Graphs that are compiled inside the block, with ``aot_eager``, and collectives that run inside of it."""
        from hecate.graph import lowering
        from hecate.runtime.comm.queue import Job

        compile, communicate = lowering.boxed_nop, Job.communicate

        def compile_watched(gm: Any, inputs: Any) -> Any:
            return _Boxed(compile(gm, inputs), self)

        def communicate_watched(job: Job) -> Any:
            with self.operators():
                return communicate(job)

        with (
            mock.patch.object(lowering, "boxed_nop", compile_watched),
            mock.patch.object(Job, "communicate", communicate_watched),
        ):
            yield

    @contextmanager
    def operators(self) -> Iterator[None]:
        """Operators of this thread inside the block, in which no compiled forward may be called: torch.compile leaves
        what it compiled aside where a mode is on.
        """
        if self.ledger is None or getattr(self._here, "on", False):
            yield
            return
        self._here.on = True
        try:
            with Watch(self.ledger):
                yield
        finally:
            self._here.on = False


class _Boxed:
    """Called with one list, which it empties. An attribute of the object says so: wrappers copy only those."""

    def __init__(self, run: Callable[[list[Any]], Any], watching: Watching) -> None:
        self._run, self._watching = run, watching
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        with self._watching.operators():
            return self._run(args)


def _gathers(func: Any) -> bool:
    from hecate.runtime.comm.collective import wait_of, whole_of

    collective = wait_of(func) or whole_of(func)
    if collective is None or collective.role == "reduce":
        return False
    return collective.role == "gather" or collective.carries == "replicas"


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
