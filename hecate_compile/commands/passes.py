"""hecate passes: the table of contents of everything that rewrites a model's code or graphs."""

from __future__ import annotations

from rich.table import Table

from hecate.commands.console import console
from hecate.passes import REQUIRED, STAGES, Rewrite, name_of, summary_of


def passes() -> None:
    """List what rewrites a model's code and graphs, in the order in which it runs.

    Each can be left out by its name, as in hecate.Config(disable_passes=("exchange_rows",)), unless it says why not.

    Example: hecate passes
    """
    for stage in STAGES:
        table = Table(title=f"{stage.name}: {stage.when}", title_justify="left", show_header=False)
        for entry in stage.entries:
            name = name_of(entry)
            always = f" (always on: {REQUIRED[name]})" if name in REQUIRED else ""
            file = entry.file if isinstance(entry, Rewrite) else "/".join(entry.__module__.split(".")[1:]) + ".py"
            table.add_row(name, summary_of(entry) + always, file)
        console().print(table)
