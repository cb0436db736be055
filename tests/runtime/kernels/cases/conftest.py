"""For all cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.kernels.device import kernel_modules


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files whose kernels were launched, one name for each launch; a reference launches none."""
    found: list[str] = []

    def counted(name: str, launch: Any) -> Any:
        def call(*args: Any, **constants: Any) -> None:
            found.append(name)
            launch(*args, **constants)

        return call

    for module in kernel_modules():
        monkeypatch.setattr(module, "launch", counted(module.__name__.rsplit(".", 1)[1], module.launch))
    yield found
