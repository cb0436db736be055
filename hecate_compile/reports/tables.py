"""Numbers as people read them, and tables that are text in a terminal and HTML in a notebook."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from rich.console import Console
from rich.table import Table

from hecate.runtime.comm.measure_rates import NO_LINK
from hecate.runtime.placement.planner import Rates

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def with_unit(number: float, unit: str) -> str:
    """Write ``129.7 GFLOP/s``: numbers of at least a thousand get a prefix."""
    for size, prefix in _PREFIXES:
        # A number that would be rounded up to 1000 of a unit is written as one of the next.
        if abs(number) >= 0.9995 * size:
            return f"{_three_digits(number / size)} {prefix}{unit}"
    return f"{_three_digits(number)} {unit}"


def as_bytes(number: float) -> str:
    """Write bytes with a decimal prefix, as rates have them: ``9.1 MB``."""
    return with_unit(number, "B")


def as_time(seconds: float) -> str:
    """Write seconds, milliseconds or microseconds: ``12.3 ms``."""
    if not seconds:
        return "0 ms"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def rates_text(rates: Rates) -> str:
    """Describe the speeds of a machine in words."""
    links = [
        f"{as_bytes(rate)}/s of a {what}"
        for what, rate in (("rank", rates.rank_bytes), ("node", rates.node_bytes))
        if rate < NO_LINK
    ]
    text = with_unit(rates.flops, "FLOP/s")
    text += f", links {' and '.join(links)}" if links else ""
    text += f", memory {as_bytes(rates.memory_bytes)}/s"
    return text + (f", {as_time(rates.hidden_seconds)} hidden in a layer" if rates.hidden_seconds else "")


def _three_digits(number: float) -> str:
    if number == int(number) and abs(number) < 1000:
        return str(int(number))
    return f"{number:.0f}" if abs(number) >= 99.95 else f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


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
