"""``hecate explain``: what Hecate makes of a model on any number of ranks, without running it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from hecate.commands.compile_given import (
    CONSOLE,
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


def explain(
    model: Model,
    ranks: Ranks = 8,
    nodes: Nodes = 1,
    cluster: Cluster = None,
    layers: Layers = None,
    rows: Rows = None,
    length: Length = None,
    policy: PolicyOption = None,
    disable_pass: Disabled = [],  # noqa: B006  typer copies it
    strict: Annotated[
        bool, typer.Option("--strict", help="end with code 3 if experts are gathered somewhere")
    ] = False,
) -> None:
    """Say what Hecate finds, rewrites and skips in MODEL, and why. Needs no weights, and no other ranks.

    Ends with code 0; 1 if the model cannot be compiled, 2 if MODEL or an option cannot be used, 3 with --strict if
    a layer gathers its experts.

    Example: hecate explain qwen3_moe --ranks 16 --nodes 2
    """
    made = compile_given(
        model, ranks=ranks, nodes=nodes, cluster=cluster, layers=layers, rows=rows, length=length, policy=policy,
        disabled=disable_pass,
    )  # fmt: skip
    console = Console(**CONSOLE)
    # Its tables have a width of their own.
    console.print(str(made.explanation), soft_wrap=True)
    for note in made.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if strict and any(skip.fallback for skip in made.explanation.skipped):
        raise typer.Exit(3)
