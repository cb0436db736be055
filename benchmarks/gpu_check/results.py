"""Rows of results in a file, written anew with each: what a process that dies has measured is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import write

# The error of a row that is begun: where a process died, if it did.
UNENDED = "did not end"
NO_TIME = "not begun: no time was left"


class Results:
    """Rows, and the file that has them.

    Args:
        to: None for rows that nobody needs in a file.
        goes_on: whether rows of an earlier process stay.
    """

    def __init__(self, to: Path | None, *, goes_on: bool = False) -> None:
        self.to = to
        self.rows: list[dict[str, Any]] = read_rows(to) if goes_on and to is not None else []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        if self.to is not None:
            write(self.to, json.dumps(self.rows))

    def begin(self, row: dict[str, Any]) -> None:
        """From here on the file says that ``row`` did not end, until something else is said of it."""
        row["error"] = UNENDED
        self.add(row)

    def end(self, row: dict[str, Any]) -> None:
        if row["error"] == UNENDED:
            del row["error"]
        self.save()

    def drop(self, row: dict[str, Any]) -> None:
        """Of what has ended there are rows of its own."""
        self.rows.remove(row)
        self.save()


def read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows
