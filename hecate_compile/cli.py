"""The command line: the names of all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import hecate
from hecate.commands.bisect import bisect
from hecate.commands.doctor import doctor
from hecate.commands.dump import dump
from hecate.commands.explain import explain
from hecate.commands.passes import passes
from hecate.commands.replay import replay
from hecate.commands.report import report
from hecate.commands.simulate import simulate

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hecate {hecate.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version, and end")
    ] = False,
) -> None:
    """Train Mixture-of-Experts models without stragglers."""


_COMMANDS: tuple[Callable[..., None], ...] = (explain, dump, bisect, passes, report, doctor, simulate, replay)
for _command in _COMMANDS:
    app.command()(_command)


if __name__ == "__main__":
    app()
