"""What commands print on."""

from __future__ import annotations

from rich.console import Console


def console(width: int = 120, *, stderr: bool = False) -> Console:
    """For text as it is: it holds paths and ranges of versions, in which brackets are brackets."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)
