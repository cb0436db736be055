"""``hecate doctor``: whether this machine can train, and what to do if not."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from hecate.commands.console import console
from hecate.commands.machine_checks import Check, State, all_checks, self_test

_SIGNS: dict[State, tuple[str, str]] = {"good": ("ok", "green"), "look": ("look", "yellow"), "bad": ("NO", "red")}


def doctor(
    test: Annotated[bool, typer.Option("--self-test/--no-self-test", help="a step on two ranks, a minute")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for the self-test")] = 180,
) -> None:
    """Look whether this machine has what training needs.

    Without torch, or another package that Hecate imports, no command starts: it says what to install instead.

    Ends with code 0; 1 if something needed is missing.

    Example: hecate doctor --no-self-test
    """
    checks = list(all_checks())
    if test:
        checks.append(self_test(timeout))
    _print(checks)
    if any(check.state == "bad" for check in checks):
        raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    screen = console()
    table = Table("", "", "found", show_edge=False, box=None)
    for check in checks:
        sign, colour = _SIGNS[check.state]
        table.add_row(sign, check.name, check.found, style=colour if check.state != "good" else None)
    screen.print(table)
    for state in ("bad", "look"):
        sign, colour = _SIGNS[state]
        for check in (one for one in checks if one.state == state):
            screen.print(f"{sign} {check.name}: {check.advice}", style=colour)
    missing = sum(check.state == "bad" for check in checks)
    screen.print(f"{missing} needed and missing" if missing else "everything that is needed is there")
