"""Tell callers apart: some libraries get answers from a compiled model that nobody else must get."""

from __future__ import annotations

import sys
from types import FrameType


def called_by(package: str) -> bool:
    """Return whether code of ``package`` is on the stack above the caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False
