"""Tables as plain text."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table


def as_text(*tables: Table | str, width: int = 120) -> str:
    """What a terminal of ``width`` columns would show."""
    # What is printed is the user's code and names, in which brackets are brackets.
    console = Console(width=width, file=io.StringIO(), record=True, markup=False, emoji=False)
    for table in tables:
        console.print(table)
    return console.export_text()
