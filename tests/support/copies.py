"""How often numbers of the host go to a device, counted on a CPU, where none is a copy."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from hecate.runtime.comm import collectives


class Copies:
    """Counts calls of ``on_device`` and its kin, for each thread of its own; ranks may be threads."""

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
