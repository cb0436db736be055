"""Tables that are text in a terminal and HTML in a notebook."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from rich.console import Console
from rich.table import Table

# Width where there is no terminal; the schedule has nine columns, one of them with names of modules.
_WIDTH = 150
# In fewer columns words would be broken.
_NARROWEST = 100


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table with its title; ``numbers`` are indices of the columns that are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()

    def table(self) -> Table:
        """Return the table for a terminal."""
        made = Table(title=self.title)
        for index, column in enumerate(self.columns):
            # Words of a head stay whole; names of modules are broken into lines.
            longest = max(map(len, column.split()), default=0)
            justify: Literal["left", "right"] = "right" if index in self.numbers else "left"
            made.add_column(column, justify=justify, min_width=longest, overflow="fold")
        for row in self.rows:
            made.add_row(*row)
        return made

    def html(self) -> str:
        """Return the table for a notebook."""

        def cell(index: int, text: str) -> str:
            align = "right" if index in self.numbers else "left"
            return f'<td style="text-align:{align}">{escape(text)}</td>'

        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join(
            f"<tr>{''.join(cell(index, text) for index, text in enumerate(row))}</tr>" for row in self.rows
        )
        return (
            f'<div style="overflow-x:auto"><table><caption style="text-align:left"><b>{escape(self.title)}</b>'
            f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


def sections_as_text(parts: Sequence[Section | str]) -> str:
    """Return the parts, one below the other, as a terminal shows them."""
    return as_text(*(part.table() if isinstance(part, Section) else part for part in parts))


def as_text(*tables: Table | str) -> str:
    """Return tables as a terminal shows them."""
    width = max(_NARROWEST, shutil.get_terminal_size((_WIDTH, 24)).columns)
    # No markup: brackets in the user's code and names are brackets.
    console = Console(width=width, file=io.StringIO(), record=True, markup=False, emoji=False)
    for table in tables:
        console.print(table)
    return console.export_text()


def sections_as_html(parts: Sequence[Section | str]) -> str:
    """Return the parts, one below the other, as a notebook shows them."""
    return "\n".join(part.html() if isinstance(part, Section) else f"<p>{escape(part)}</p>" for part in parts)
