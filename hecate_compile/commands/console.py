"""The console that commands print on."""

from __future__ import annotations

from rich.console import Console


def console(width: int = 120, *, stderr: bool = False) -> Console:
    """Return a console that prints text unchanged: brackets in paths and ranges of versions are no markup."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)
