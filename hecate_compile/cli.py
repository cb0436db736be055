"""The command line: ``hecate simulate`` and ``hecate replay``, and the names of all other commands."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from hecate.commands.bisect import bisect
from hecate.commands.doctor import doctor
from hecate.commands.explain import dump, explain
from hecate.commands.load_name import load_name
from hecate.commands.report import report
from hecate.runtime.placement.hecate_policy import Hecate, Replicas
from hecate.runtime.placement.policy import Policy, Static
from hecate.runtime.placement.topology import Topology
from hecate.simulator import Capture, ClusterError, ClusterSpec
from hecate.simulator.capture import CaptureError
from hecate.simulator.replay import load_recorded
from hecate.simulator.replay import replay as replay_trace
from hecate.simulator.study import STEPS, Build, Options, Result, study
from hecate.simulator.workloads import WORKLOADS, Counts, fit, load_trace, make

MostReplicas = Annotated[str, typer.Option(help="most replicas on a rank; auto: as many as are predicted to pay")]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Train Mixture-of-Experts models without stragglers."""


_COMMANDS: tuple[Callable[..., None], ...] = (explain, dump, bisect, report, doctor)
for _command in _COMMANDS:
    app.command()(_command)


@app.command()
def simulate(
    model: Annotated[
        str, typer.Argument(help="file.py:function that returns a model and a batch of one rank, a dict")
    ],
    cluster: Annotated[list[Path], typer.Option(help="a TOML file; may be given several times")],
    policy: Annotated[
        list[str], typer.Option(help="static, hecate, paper, or file.py:Class of your own; several times")
    ] = ["static", "hecate"],  # noqa: B006  typer copies it
    trace: Annotated[Path | None, typer.Option(help="routing that hecate.record wrote")] = None,
    workload: Annotated[str, typer.Option(help=f"made-up routing instead: {', '.join(WORKLOADS)}")] = "zipf",
    skew: Annotated[float, typer.Option(help="exponent of zipf and drift")] = 1.5,
    replicas: MostReplicas = "auto",
    rematerialize: Annotated[bool, typer.Option(help="gather replicas again for the backward")] = False,
    steps: Annotated[int, typer.Option(min=1, help="steps to simulate, spread over the trace")] = 3,
    optimizer_bytes: Annotated[float, typer.Option(help="per parameter, beside itself and its gradient")] = 8.0,
    out: Annotated[Path | None, typer.Option("--json", help="write the results to this file too")] = None,
) -> None:
    """Predict a training step of MODEL on clusters that are not there, for each policy.

    Operations and bytes come from the compiled graph, rows and replicas from what the policy makes of the routing.

    Example: hecate simulate model.py:build --cluster h100-64.toml --policy static --policy hecate
    """
    if out is not None and not out.resolve().parent.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {out.resolve().parent}")
    # Of transformers' code, and nothing that a user could do about.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    most = _replicas(replicas)
    options = Options(
        replicas=most, rematerialize=rematerialize, steps=steps, optimizer_bytes=optimizer_bytes
    )  # fmt: skip
    try:
        clusters = [ClusterSpec.load(path) for path in cluster]
        names = [spec.name for spec in clusters]
        if len(set(names)) < len(names):
            raise typer.BadParameter(f"two clusters have the same name: {', '.join(names)}. A file can set its name.")
        makers = {name: _policy(name, most) for name in policy}
        build = _function(model)
        routing = _routing(trace, workload, skew)
        results = []
        for spec in clusters:
            # A policy remembers steps, so each cluster gets its own.
            results += study(build, spec, copy.deepcopy(makers), partial(routing, spec), options)
    except (ClusterError, CaptureError, ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    Console(width=160, markup=False, emoji=False).print(_table(results))
    if out is not None:
        out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="routing that hecate.record wrote")],
    policy: Annotated[
        list[str], typer.Option(help="static, hecate, paper, or file.py:Class of your own; several times")
    ] = ["static", "hecate"],  # noqa: B006  typer copies it
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes of equal size; by default those of the run")] = None,
    replicas: MostReplicas = "auto",
) -> None:
    """Play the routing of a run back, for each policy, with the run's own model, ranks and rates.

    Example: hecate replay trace.npz --policy static --policy hecate --nodes 2
    """
    try:
        most = _replicas(replicas)
        counts, owners = load_trace(trace)
        recorded = load_recorded(trace)
        steps, layers, ranks, experts = counts.shape
        if nodes is not None and ranks % nodes:
            raise typer.BadParameter(f"--nodes {nodes} does not divide the {ranks} ranks of {trace}")
        topology = Topology.even(ranks, ranks // nodes) if nodes is not None else recorded.topology
        results = {
            name: replay_trace(
                counts, owners, _policy(name, most), topology, rates=recorded.rates, sizes=recorded.sizes
            )
            for name in policy
        }
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    table = Table(
        "policy", "max/mean rows", "99th percentile", "replicas per layer", "rows leaving a node", "owners changed",
        "ms of a layer", "times as fast",
        title=f"{trace.name}: {steps} steps, {layers} layers, {ranks} ranks on {topology.num_nodes} node(s), "
        f"{experts} experts",
        caption="predicted for what experts compute and send; times as fast as the first policy",
    )  # fmt: skip
    first = results[policy[0]].seconds.mean()
    for name, result in results.items():
        table.add_row(
            name, f"{result.imbalance.mean():.2f}", f"{np.percentile(result.imbalance, 99):.2f}",
            f"{result.replicas.mean():.1f}", f"{result.crossing.sum() / max(1, result.rows.sum()):.0%}",
            str(result.moved), f"{result.seconds.mean() * 1e3:.3f}", f"{first / result.seconds.mean():.2f}",
        )  # fmt: skip
    Console(width=150, markup=False, emoji=False).print(table)


def _routing(trace: Path | None, workload: str, skew: float) -> Callable[[ClusterSpec, Capture], Counts]:
    """Rows ``[step, layer, rank, expert]`` for a model on a cluster."""
    recorded = load_trace(trace)[0] if trace is not None else None
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"no workload {workload!r}; there are {', '.join(WORKLOADS)}")

    def routing(spec: ClusterSpec, made: Capture) -> Counts:
        layers, experts = len(made.layers), made.layers[0].num_experts
        if recorded is None:
            shape = {"layers": layers, "ranks": spec.ranks, "experts": experts, "rows": made.rows}
            return make(workload, steps=STEPS, skew=skew, **shape)
        if recorded.shape[3] != experts:
            raise ValueError(f"{trace} has {recorded.shape[3]} experts, the model has {experts}")
        return fit(recorded, layers=layers, ranks=spec.ranks, rows=made.rows)

    return routing


def _table(results: list[Result]) -> Table:
    table = Table(
        "cluster", "policy", "step, ms", "times as fast", "max/mean rows", "replicas per layer", "waits, ms",
        "GB leaving a node", "GB of states", "GB of slots", "GB, peak", "GB, activations",
        caption="times as fast as the first policy on the same cluster; memory of the rank with most, in brackets "
        "the mean of all; peak and activations as if no operators were fused",
    )  # fmt: skip
    first: dict[str, float] = {}
    for r in results:
        base = first.setdefault(r.cluster, r.seconds)
        table.add_row(
            r.cluster, r.policy, f"{r.seconds * 1e3:.1f}", f"{base / r.seconds:.2f}", f"{r.imbalance:.2f}",
            f"{r.replicas:.1f}", f"{r.waited * 1e3:.1f}", f"{r.node_bytes / 1e9:.3f}", f"{r.states / 1e9:.3f}",
            f"{r.slot_bytes / 1e9:.3f}", f"{r.peak / 1e9:.1f} ({r.mean_peak / 1e9:.1f})",
            f"{r.activations / 1e9:.1f} ({r.mean_activations / 1e9:.1f})",
        )  # fmt: skip
    return table


def _replicas(text: str) -> Replicas:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise typer.BadParameter(f"--replicas {text}: expected auto, or a whole number of at least 0")
    return int(text)


def _policy(name: str, replicas: Replicas) -> Policy:
    known = {
        "static": Static, "hecate": lambda: Hecate(objective="time", replicas=replicas),
        "paper": lambda: Hecate(objective="paper", replicas=replicas),
    }  # fmt: skip
    if name in known:
        return known[name]()
    if ":" not in name:
        raise typer.BadParameter(f"no policy {name!r}; there are {', '.join(known)}, and file.py:Class")
    kind = load_name(name, "policy", "Class")
    policy = kind() if isinstance(kind, type) and issubclass(kind, Policy) else None
    if policy is None:
        raise typer.BadParameter(f"policy {name!r} is no hecate.Policy")
    if hasattr(policy, "replicas") and replicas != "auto":
        policy.replicas = replicas
    return policy


def _function(name: str) -> Build:
    function = load_name(name, "model", "function")

    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        made = function()
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
            raise typer.BadParameter(f"{name} must return a model and a batch: (nn.Module, dict of tensors)")
        return made

    return build


if __name__ == "__main__":
    app()
