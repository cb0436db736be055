"""``hecate simulate``: a training step on clusters that are not there."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table
from torch import nn

from hecate.commands.built import Batch, Built, build
from hecate.commands.console import compiling, console
from hecate.commands.replay import MOST_REPLICAS, PolicyNames, policy_named, replicas_of
from hecate.config import Config
from hecate.simulator import Capture, ClusterError, ClusterSpec
from hecate.simulator.study import STEPS, Options, Result, study
from hecate.simulator.workloads import WORKLOADS, Counts, fit, load_trace, make


def simulate(
    model: Annotated[
        str, typer.Argument(help="file.py:function that returns a model and a batch of one rank, a dict")
    ],
    cluster: Annotated[list[Path], typer.Option(help="a TOML file; may be given several times")],
    policy: PolicyNames = ["static", "hecate"],  # noqa: B006  typer copies it
    trace: Annotated[Path | None, typer.Option(help="routing that hecate.record wrote")] = None,
    workload: Annotated[str, typer.Option(help=f"made-up routing instead: {', '.join(WORKLOADS)}")] = "zipf",
    skew: Annotated[float, typer.Option(help="exponent of zipf and drift")] = 1.5,
    replicas: Annotated[
        str | None, typer.Option(help=f"{MOST_REPLICAS}; by default as MODEL's own hecate.Config, or auto")
    ] = None,
    rematerialize: Annotated[
        bool | None, typer.Option(help="gather replicas again for the backward; by default as MODEL's own config")
    ] = None,
    expert_group: Annotated[
        str | None, typer.Option(help="ranks of a group, or auto; by default as MODEL's own config, or all ranks")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to simulate, spread over the trace")] = 3,
    optimizer_bytes: Annotated[float, typer.Option(help="per parameter, beside itself and its gradient")] = 8.0,
    out: Annotated[Path | None, typer.Option("--json", help="write the results to this file too")] = None,
) -> None:
    """Predict a training step of MODEL on clusters that are not there, for each policy.

    Operations and bytes come from the compiled graph, rows and replicas from what the policy makes of the routing.
    If the function returns a hecate.Config after the batch, the model is compiled with it, but for its policy.

    Ends with code 0; 1 if the model cannot be compiled, 2 if MODEL, a cluster or an option cannot be used.

    Example: hecate simulate model.py:build --cluster h100-64.toml --policy static --policy hecate
    """
    if out is not None:
        _check_writable(out)
    given = None if replicas is None else replicas_of(replicas)
    try:
        clusters = [ClusterSpec.load(path) for path in cluster]
        names = [spec.name for spec in clusters]
        if len(set(names)) < len(names):
            raise typer.BadParameter(f"two clusters have the same name: {', '.join(names)}. A file can set its name.")
        routing = _routing(trace, workload, skew)
        made = build(model)
        config = made.config or Config()
        # Speeds and nodes are the cluster's.
        config = replace(
            config,
            rates=None,
            topology=None,
            dump=None,
            replicas=config.replicas if given is None else given,
            rematerialize=config.rematerialize if rematerialize is None else rematerialize,
            expert_group=config.expert_group if expert_group is None else _group_of(expert_group),
        )
        if isinstance(config.expert_group, int):
            for spec in clusters:
                spec.of_group(config.expert_group)
        makers = {name: policy_named(name, config.replicas) for name in policy}
        options = Options(config=config, steps=steps, optimizer_bytes=optimizer_bytes)
    except (ClusterError, ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    results: list[Result] = []
    builder = _builder(model, made)
    for spec in clusters:
        with compiling():
            # A policy remembers steps, so each cluster gets its own.
            results += study(builder, spec, copy.deepcopy(makers), partial(routing, spec), options)
    console(160).print(_table(results))
    if out is not None:
        try:
            out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        except OSError as error:
            raise typer.BadParameter(f"--json: {error}") from None


def _group_of(text: str) -> int | Literal["auto"]:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"--expert-group: {text!r}, expected a number of ranks, or auto")
    return "auto" if text == "auto" else int(text)


def _check_writable(out: Path) -> None:
    """Refuse a file that cannot be written, before minutes of work rather than after them."""
    folder = out.resolve().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {folder}")
    if out.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"--json: {out} cannot be written; expected a file in a folder that can")


def _builder(name: str, first: Built) -> Callable[[], tuple[nn.Module, Batch]]:
    """Return a function that gives a new model at each call, for compiling changes a model."""
    ready = [first]

    def made() -> tuple[nn.Module, Batch]:
        one = ready.pop() if ready else build(name)
        return one.model, one.batches[0]

    return made


def _routing(trace: Path | None, workload: str, skew: float) -> Callable[[ClusterSpec, Capture], Counts]:
    """Return a function that gives rows ``[step, layer, rank, expert]`` for a model on a cluster."""
    recorded = load_trace(trace)[0] if trace is not None else None
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"no workload {workload!r}; there are {', '.join(WORKLOADS)}")

    def routing(spec: ClusterSpec, made: Capture) -> Counts:
        layers, experts = len(made.layers), made.layers[0].num_experts
        if recorded is None:
            shape = {"layers": layers, "ranks": spec.ranks, "experts": experts, "rows": made.rows}
            return make(workload, steps=STEPS, skew=skew, **shape)
        if recorded.shape[3] != experts:
            raise typer.BadParameter(f"{trace} has {recorded.shape[3]} experts, the model has {experts}")
        try:
            return fit(recorded, layers=layers, ranks=spec.ranks, rows=made.rows)
        except ValueError as error:
            raise typer.BadParameter(f"{trace}: {error}") from None

    return routing


def _table(results: list[Result]) -> Table:
    table = Table(
        "cluster",
        "policy",
        "step, ms",
        "times as fast",
        "max/mean rows",
        "replicas per layer",
        "waits, ms",
        "GB leaving a node",
        "GB of states",
        "GB of slots",
        "GB, peak",
        "GB, activations",
        caption="times as fast as the first policy on the same cluster; memory of the rank with most, in brackets "
        "the mean of all; peak and activations as if no operators were fused",
    )
    first: dict[str, float] = {}
    for r in results:
        base = first.setdefault(r.cluster, r.seconds)
        table.add_row(
            r.cluster,
            r.policy,
            f"{r.seconds * 1e3:.1f}",
            f"{base / r.seconds:.2f}",
            f"{r.imbalance:.2f}",
            f"{r.replicas:.1f}",
            f"{r.waited * 1e3:.1f}",
            f"{r.node_bytes / 1e9:.3f}",
            f"{r.states / 1e9:.3f}",
            f"{r.slot_bytes / 1e9:.3f}",
            f"{r.peak / 1e9:.1f} ({r.mean_peak / 1e9:.1f})",
            f"{r.activations / 1e9:.1f} ({r.mean_activations / 1e9:.1f})",
        )
    return table
