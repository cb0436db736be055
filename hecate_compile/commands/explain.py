"""``hecate explain``: what Hecate makes of a model on any number of ranks, without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from hecate.commands import compile_given as given
from hecate.commands.console import console


def explain(
    model: given.Model,
    ranks: given.Ranks = 8,
    nodes: given.Nodes = 1,
    cluster: given.Cluster = None,
    layers: given.Layers = None,
    rows: given.Rows = None,
    length: given.Length = None,
    policy: given.PolicyOption = None,
    disable_pass: given.Disabled = [],  # noqa: B006  typer copies it
    strict: Annotated[
        bool, typer.Option("--strict", help="end with code 3 if experts are gathered somewhere")
    ] = False,
) -> None:
    """Say what Hecate finds, rewrites and skips in MODEL, and why. Needs no weights, and no other ranks.

    Ends with code 0; 1 if the model cannot be compiled, 2 if MODEL or an option cannot be used, 3 with --strict if
    a layer gathers its experts.

    Example: hecate explain qwen3_moe --ranks 16 --nodes 2
    """
    made = given.compile_given(
        model,
        ranks=ranks,
        nodes=nodes,
        cluster=cluster,
        layers=layers,
        rows=rows,
        length=length,
        policy=policy,
        disabled=disable_pass,
    )
    screen = console()
    # Tables of the explanation have a width of their own.
    screen.print(str(made.explanation), soft_wrap=True)
    made.print_notes(screen)
    if strict and any(not region.rewritten for region in made.explanation.regions):
        raise typer.Exit(3)
