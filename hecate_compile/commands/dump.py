"""``hecate dump``: the graphs of a model, and what each pass changes in them, without running it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hecate.commands.console import console
from hecate.commands.explain import (
    Cluster,
    Disabled,
    Layers,
    Length,
    Model,
    Nodes,
    PolicyOption,
    Ranks,
    Rows,
    compile_given,
)
from hecate.reports.tables import as_bytes

_BROKE_OFF = "a warning above says what could not be written"


def dump(
    model: Model,
    out: Annotated[Path, typer.Option(help="folder for the graphs")] = Path("hecate-dump"),
    ranks: Ranks = 8,
    nodes: Nodes = 1,
    cluster: Cluster = None,
    layers: Layers = None,
    rows: Rows = None,
    length: Length = None,
    policy: PolicyOption = None,
    disable_pass: Disabled = [],  # noqa: B006  typer copies it
) -> None:
    """Write the graphs of MODEL, and what each pass changes in them, into a folder. Needs no weights, no other ranks.

    Ends with code 0; 1 if the model cannot be compiled, no graph came of it or not all could be written, 2 if MODEL
    or an option cannot be used.

    Example: hecate dump model.py:build --out graphs --ranks 4
    """
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out {out} is a file, expected a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: {error}") from None
    began = time.time()
    made = compile_given(
        model,
        ranks=ranks,
        nodes=nodes,
        cluster=cluster,
        layers=layers,
        rows=rows,
        length=length,
        policy=policy,
        disabled=disable_pass,
        dump=out,
    )
    screen = console()
    # The folder may hold graphs of an earlier run. File systems round times.
    files = [path for path in sorted(out.glob("rank*/**/*")) if path.is_file() and path.stat().st_mtime > began - 2]
    if not files:
        why = "no graph was compiled. hecate explain says what was found" if made.dumped_all else _BROKE_OFF
        screen.print(f"no dump was written to {out}: {why}", soft_wrap=True)
        raise typer.Exit(1)
    size = as_bytes(sum(path.stat().st_size for path in files))
    screen.print(f"{len(files)} files, {size}: {out}", soft_wrap=True)
    for page in (path for path in files if path.name == "index.html"):
        screen.print(f"open {page}", soft_wrap=True)
    made.print_notes(screen)
    if not made.dumped_all:
        screen.print(f"the dump is not whole: {_BROKE_OFF}", soft_wrap=True)
        raise typer.Exit(1)
