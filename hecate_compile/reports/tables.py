"""Tables that are text in a terminal and HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table

from hecate.reports.text import as_text


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table with its title.

    Attributes:
        numbers: indices of the columns that are numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()

    def table(self) -> Table:
        """For a terminal."""
        made = Table(title=self.title)
        for index, column in enumerate(self.columns):
            made.add_column(column, justify="right" if index in self.numbers else "left")
        for row in self.rows:
            made.add_row(*row)
        return made

    def html(self) -> str:
        """For a notebook."""

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
    """One below the other, as a terminal shows them."""
    # The schedule has nine columns, one of them with names of modules.
    return as_text(*(part.table() if isinstance(part, Section) else part for part in parts), width=150)


def sections_as_html(parts: Sequence[Section | str]) -> str:
    """One below the other, as a notebook shows them."""
    return "\n".join(part.html() if isinstance(part, Section) else f"<p>{escape(part)}</p>" for part in parts)
