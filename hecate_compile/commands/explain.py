"""``hecate explain`` and ``hecate dump``: what Hecate makes of a model on any number of ranks, without running it."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.console import Console
from torch import nn

from hecate.api import compile
from hecate.api import explain as explain_model
from hecate.commands.given_model import HELP, GivenModel, given_model
from hecate.config import Config, PolicyName
from hecate.graph.lowering import Captured, NotRun, capturing
from hecate.passes.final.collective_notes import notes_in, schedule_lines
from hecate.reports.explanation import Explanation
from hecate.simulator.cluster import ClusterError, ClusterSpec
from hecate.simulator.fake_ranks import CaptureError, fake_ranks
from hecate.wrap.find_experts import NoExpertsError
from hecate.wrap.parameter_reads import UntracedReadError

Model = Annotated[str, typer.Argument(help=HELP)]
Ranks = Annotated[int, typer.Option(min=1, help="ranks to compile for")]
Nodes = Annotated[int, typer.Option(min=1, help="nodes of equal size that they are on")]
Cluster = Annotated[Path | None, typer.Option(help="a TOML file with ranks, nodes and speeds instead")]
Layers = Annotated[int | None, typer.Option(min=1, help="layers of a config of transformers; by default few")]
Rows = Annotated[int, typer.Option("--batch", min=1, help="sequences of a rank, for a config of transformers")]
Length = Annotated[int, typer.Option(min=2, help="tokens of each")]
PolicyOption = Annotated[str, typer.Option(help="hecate, static, gather or replicate")]
Disabled = Annotated[list[str], typer.Option("--disable-pass", help="a pass to leave out; several times")]
Strict = Annotated[bool, typer.Option("--strict", help="end with code 3 if experts are gathered somewhere")]

_CONSOLE: dict[str, Any] = {"width": 120, "markup": False, "emoji": False, "highlight": False}


def explain(
    model: Model,
    ranks: Ranks = 8,
    nodes: Nodes = 1,
    cluster: Cluster = None,
    layers: Layers = None,
    rows: Rows = 1,
    length: Length = 128,
    policy: PolicyOption = "hecate",
    disable_pass: Disabled = [],  # noqa: B006  typer copies it
    strict: Strict = False,
) -> None:
    """Say what Hecate finds, rewrites and skips in MODEL, and why. Needs no weights, and no other ranks.

    Example: hecate explain qwen3_moe --ranks 16 --nodes 2
    """
    spec, config = _cluster(cluster, ranks, nodes), _config(policy, disable_pass)
    given = given_model(model, layers=layers, rows=rows, length=length, ranks=spec.ranks)
    made, graphs = _compile(given, spec, config)
    console = Console(**_CONSOLE)
    # Its tables have a width of their own.
    console.print(str(made), soft_wrap=True)
    for captured in graphs:
        lines = schedule_lines(notes_in(captured.graph.graph.nodes), measured=False)
        if lines:
            console.print(f"schedule of the {captured.context.part}: predicted ms behind ms of compute")
            for line in lines:
                console.print(line)
    _say_notes(console, given, made, cluster)
    if strict and any(skip.fallback for skip in made.skipped):
        raise typer.Exit(3)


def dump(
    model: Model,
    out: Annotated[Path, typer.Option(help="folder for the graphs")] = Path("hecate-dump"),
    ranks: Ranks = 8,
    nodes: Nodes = 1,
    cluster: Cluster = None,
    layers: Layers = None,
    rows: Rows = 1,
    length: Length = 128,
    policy: PolicyOption = "hecate",
    disable_pass: Disabled = [],  # noqa: B006  typer copies it
) -> None:
    """Write the graphs of MODEL, and what each pass changes in them, into a folder. Needs no weights, no other ranks.

    Example: hecate dump model.py:build --out graphs --ranks 4
    """
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out {out} is a file, expected a folder")
    spec, config = _cluster(cluster, ranks, nodes), _config(policy, disable_pass)
    given = given_model(model, layers=layers, rows=rows, length=length, ranks=spec.ranks)
    made, _ = _compile(given, spec, replace(config, dump=out))
    console = Console(**_CONSOLE)
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    if not files:
        console.print(f"no dump was written to {out}: no graph was compiled. hecate explain says what was found")
        raise typer.Exit(1)
    size = sum(path.stat().st_size for path in files)
    console.print(f"{len(files)} files, {size / 1e6:.1f} MB: {out}", soft_wrap=True)
    for page in (path for path in files if path.name == "index.html"):
        console.print(f"open {page}", soft_wrap=True)
    _say_notes(console, given, made, cluster)


def _cluster(cluster: Path | None, ranks: int, nodes: int) -> ClusterSpec:
    if cluster is not None:
        try:
            return ClusterSpec.load(cluster)
        except ClusterError as error:
            raise typer.BadParameter(str(error)) from None
    if ranks % nodes:
        raise typer.BadParameter(f"--nodes {nodes} does not divide --ranks {ranks}")
    # Of today's accelerators, about: without a machine there are no measured ones.
    return ClusterSpec(
        name="made up", nodes=nodes, gpus=ranks // nodes, flops=2e14, memory_bytes=2e12, rank_bytes=2e11,
        node_bytes=1e11,
    )  # fmt: skip


def _config(policy: str, disabled: list[str]) -> Config:
    if policy not in get_args(PolicyName):
        raise typer.BadParameter(f"no policy {policy!r}; there are {', '.join(get_args(PolicyName))}")
    # What is captured is not run, so nothing is lost without Inductor.
    names: Any = policy
    return Config(policy=names, disable_passes=tuple(disabled), backend="aot_eager")


def _compile(given: GivenModel, spec: ClusterSpec, config: Config) -> tuple[Explanation, list[Captured]]:
    """Compile as rank 0 would. What is wrong with the model ends the program with code 1, and says what."""
    warnings.filterwarnings("ignore", message="hecate.compile: nothing initialized")
    # Of transformers' code, and nothing that a user could do about.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    try:
        with fake_ranks(spec.ranks):
            compiled: nn.Module = compile(given.model, replace(config, topology=spec.topology, rates=spec.rates))
            with capturing() as graphs, suppress(NotRun):
                compiled(**given.inputs)
        return explain_model(compiled), graphs
    except (CaptureError, NoExpertsError, UntracedReadError, RuntimeError, TypeError, ValueError) as error:
        # A pass that is unknown, and the like, are the user's words; all else is about the model.
        if isinstance(error, ValueError) and str(error).startswith("hecate.Config"):
            raise typer.BadParameter(str(error)) from None
        Console(stderr=True, **_CONSOLE).print(f"hecate cannot compile this model: {error}", soft_wrap=True)
        raise typer.Exit(1) from None


def _say_notes(console: Console, given: GivenModel, made: Explanation, cluster: Path | None) -> None:
    if given.note:
        console.print(f"note: {given.note}")
    if cluster is None and made.world.size > 1:
        console.print("note: predicted with speeds that are made up; --cluster FILE has those of a machine")
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    if breaks:
        console.print(f"note: {len(breaks)} graph breaks, so only the first graph is shown; TORCH_LOGS=graph_breaks")
