"""``hecate explain``: what Hecate makes of a model on any number of ranks, without running it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from hecate.api import explain as explanation_of
from hecate.commands.console import compiling, console
from hecate.commands.given_model import HELP, LENGTH, ROWS, given_model
from hecate.compiled_model import compiled_model_of
from hecate.config import Config, PolicyName
from hecate.reports.explanation import Explanation
from hecate.simulator.capture import compile_as_rank_0
from hecate.simulator.cluster import ClusterError, ClusterSpec

Model = Annotated[str, typer.Argument(help=HELP)]
Ranks = Annotated[int, typer.Option(min=1, help="ranks to compile for")]
Nodes = Annotated[int, typer.Option(min=1, help="nodes of equal size that they are on")]
Cluster = Annotated[Path | None, typer.Option(help="a TOML file with ranks, nodes and speeds instead")]
Layers = Annotated[int | None, typer.Option(min=1, help="layers of a config of transformers; by default few")]
Rows = Annotated[
    int | None, typer.Option("--batch", min=1, help=f"sequences of a rank, for a config of transformers ({ROWS})")
]
Length = Annotated[int | None, typer.Option(min=2, help=f"tokens of each ({LENGTH})")]
PolicyOption = Annotated[
    str | None, typer.Option(help="hecate, static, gather or replicate; by default that of MODEL's own hecate.Config")
]
Disabled = Annotated[list[str], typer.Option("--disable-pass", help="a pass to leave out; several times")]


@dataclass(frozen=True, kw_only=True)
class CompiledGiven:
    """A model that was compiled and not run, notes for the user, and whether the dump, if any, is complete."""

    explanation: Explanation
    notes: list[str]
    dumped_all: bool = True

    def print_notes(self, console: Console) -> None:
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True)


def compile_given(
    model: str,
    *,
    ranks: int,
    nodes: int,
    cluster: Path | None,
    layers: int | None,
    rows: int | None,
    length: int | None,
    policy: str | None,
    disabled: list[str],
    dump: Path | None = None,
) -> CompiledGiven:
    """Compile MODEL with its own config, if it has one, and the options on top; see :func:`compiling` for errors."""
    spec = _cluster(cluster, ranks, nodes)
    if policy is not None and policy not in get_args(PolicyName):
        raise typer.BadParameter(f"no policy {policy!r}; there are {', '.join(get_args(PolicyName))}")
    given, note = given_model(model, layers=layers, rows=rows, length=length, ranks=spec.ranks)
    config = _with_options(given.config or Config(), policy, disabled, dump)
    with compiling():
        made = compile_as_rank_0(given.model, given.batches[0], spec, config)
    explanation = explanation_of(made.model)
    notes = [note] if note else []
    if cluster is None and explanation.world.size > 1:
        notes.append("predicted with speeds that are made up; --cluster FILE has those of a machine")
    if made.breaks:
        notes.append(f"{len(made.breaks)} graph breaks, so only the first graph is shown; TORCH_LOGS=graph_breaks")
    backend = compiled_model_of(made.model, "explain").backend
    return CompiledGiven(explanation=explanation, notes=notes, dumped_all=backend.dumped_all)


def _with_options(config: Config, policy: str | None, disabled: list[str], dump: Path | None) -> Config:
    name: Any = policy
    try:
        # Graphs are captured and not run, so nothing is lost without Inductor. Speeds are the cluster's.
        return replace(
            config,
            policy=name if name is not None else config.policy,
            rates=None,
            topology=None,
            disable_passes=(*config.disable_passes, *disabled),
            backend="aot_eager",
            dump=dump,
            dump_ranks="first",
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _cluster(cluster: Path | None, ranks: int, nodes: int) -> ClusterSpec:
    if cluster is not None:
        try:
            return ClusterSpec.load(cluster)
        except ClusterError as error:
            raise typer.BadParameter(str(error)) from None
    if ranks % nodes:
        raise typer.BadParameter(f"--nodes {nodes} does not divide --ranks {ranks}")
    # About the speeds of today's accelerators: without a machine there are no measured ones.
    return ClusterSpec(
        name="made up",
        nodes=nodes,
        gpus=ranks // nodes,
        flops=2e14,
        memory_bytes=2e12,
        rank_bytes=2e11,
        node_bytes=1e11,
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
    a layer gathers its experts, or is in no graph that could be shown.

    Example: hecate explain qwen3_moe --ranks 16 --nodes 2
    """
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
    )
    screen = console()
    # Tables of the explanation have a width of their own.
    screen.print(str(made.explanation), soft_wrap=True)
    made.print_notes(screen)
    if strict and (made.explanation.gathers or made.explanation.unseen):
        raise typer.Exit(3)
