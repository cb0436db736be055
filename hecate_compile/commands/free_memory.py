"""The memory that this machine has left."""

from __future__ import annotations

from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes that programs can still have, without any GPU's; None where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
