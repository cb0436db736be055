"""What is counted while operators run: memory that somebody still holds, and numbers that go to a device."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hecate.runtime.comm import collectives


class Alive(TorchDispatchMode):
    """Counts bytes of floating-point tensors while it is on, in its thread, without those of ``known``.

    Attributes:
        peak: the most behind any operator.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        """Of what is there now."""
        return sum(size for reference, size in self._found.values() if not reference.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if (storage := tensor.untyped_storage())._cdata not in self._known:
                # An address may be that of memory that is gone.
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        return out


class Copies:
    """Counts how often numbers of the host go to a device, for each thread of its own; ranks may be threads.

    It counts calls, on a CPU, too, where none is a copy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts: Counter[int] = Counter()
        for name in ("on_device", "on_device_together"):
            original = getattr(collectives, name)
            for module in [module for key, module in sys.modules.items() if key.startswith("hecate.")]:
                if getattr(module, name, None) is original:
                    monkeypatch.setattr(module, name, self._counted(original))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            thread = threading.get_ident()
            before = self._counts[thread]
            found = original(*args, **options)
            # One calls the other where there is a device.
            self._counts[thread] = before + 1
            return found

        return counted

    def take(self) -> int:
        """Copies of this thread since the last time."""
        return self._counts.pop(threading.get_ident(), 0)
