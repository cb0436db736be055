"""``hecate report``: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hecate.commands.console import console
from hecate.reports.run_alerts import find_alerts
from hecate.reports.run_data import load_run
from hecate.reports.run_files import RunError


def report(
    run: Annotated[Path, typer.Argument(help="folder that hecate.monitor(model, folder) wrote")],
    out: Annotated[Path | None, typer.Option(help="the page; by default RUN/report.html")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="end with code 3 if there are alerts")] = False,
) -> None:
    """Draw a run as one HTML page that needs nothing else: load, placements, time, memory, alerts.

    It can be called while the run goes on, or after it was killed.

    It needs matplotlib: pip install 'hecate-compile[report]'.

    Ends with code 0; 1 if matplotlib is missing, 2 if there is no run that can be read, 3 with --strict if there are
    alerts.

    Example: hecate report runs/x --out x.html
    """
    screen = console()
    target = out if out is not None else run / "report.html"
    if not target.resolve().parent.is_dir():
        raise typer.BadParameter(
            f"there is no folder {target.resolve().parent}"
            + ("; hecate.monitor(model, folder) writes a run" if out is None else "")
        )
    try:
        # The page draws with matplotlib, which is not installed with Hecate.
        from hecate.reports.run_page import page_of
    except ModuleNotFoundError as error:
        screen.print(f"hecate report needs {error.name}: pip install 'hecate-compile[report]'", markup=False)
        raise typer.Exit(1) from None
    try:
        data = load_run(run)
        alerts = find_alerts(data)
        page = page_of(data, name=run.resolve().name, alerts=alerts)
        target.write_text(page, encoding="utf-8")
    except (RunError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    screen.print(f"{data.steps} steps of {data.head.world_size} rank(s): {target}", soft_wrap=True)
    for note in data.notes:
        screen.print(f"note: {note}")
    for alert in alerts:
        screen.print(f"alert: {alert.text}. {alert.advice}")
    if alerts and strict:
        raise typer.Exit(3)
