"""How often numbers of the host go to a device, counted where it would be a copy on a GPU."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import pytest

from hecate.runtime.comm import collectives


class Copies:
    """Counts calls of ``on_device``, for each thread of its own; ranks may be threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts: Counter[int] = Counter()
        original = collectives.on_device

        def counted(*args: Any, **options: Any) -> Any:
            self._counts[threading.get_ident()] += 1
            return original(*args, **options)

        for name, module in list(sys.modules.items()):
            if name.startswith("hecate.") and getattr(module, "on_device", None) is original:
                monkeypatch.setattr(module, "on_device", counted)

    def take(self) -> int:
        """Copies of this thread since the last time."""
        return self._counts.pop(threading.get_ident(), 0)
