"""The command line: ``hecate simulate``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from hecate.config import Config
from hecate.runtime.measure import hidden_seconds
from hecate.runtime.policies import Hecate, Policy, Static
from hecate.simulator import ClusterError, ClusterSpec, Simulator, capture, walk
from hecate.simulator.memory import measure_memory
from hecate.simulator.workloads import WORKLOADS, Counts, fit, make

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# Steps that a policy has seen before the first that is simulated.
HISTORY = 20


@app.callback()
def main() -> None:
    """Train Mixture-of-Experts models without stragglers."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A policy on a cluster: means over the simulated steps.

    Attributes:
        seconds: of a step.
        imbalance: rows of the busiest rank over the mean.
        exposed: seconds that the rank which computes least stands still for collectives and others.
        replicas: of all ranks, per layer.
        node_bytes: bytes that leave a node in a step, the one that sends most.
        states, replica_bytes: memory of the rank with most.
    """

    cluster: str
    policy: str
    seconds: float
    imbalance: float
    exposed: float
    replicas: float
    node_bytes: float
    states: float
    replica_bytes: float


@app.command()
def simulate(
    model: Annotated[
        str, typer.Argument(help="file.py:function that returns a model and a batch of one rank, a dict")
    ],
    cluster: Annotated[list[Path], typer.Option(help="a TOML file; may be given several times")],
    policy: Annotated[
        list[str], typer.Option(help="static, hecate, paper, or module:Class of your own; several times")
    ] = ["static", "hecate"],  # noqa: B006  typer copies it
    trace: Annotated[Path | None, typer.Option(help="routing that hecate.record wrote")] = None,
    workload: Annotated[str, typer.Option(help=f"made-up routing instead: {', '.join(WORKLOADS)}")] = "zipf",
    skew: Annotated[float, typer.Option(help="exponent of zipf and drift")] = 1.5,
    replicas: Annotated[int, typer.Option(min=0, help="most replicas on a rank")] = 2,
    rematerialize: Annotated[bool, typer.Option(help="gather replicas again for the backward")] = False,
    steps: Annotated[int, typer.Option(min=1, help="steps to simulate, spread over the trace")] = 3,
    optimizer_bytes: Annotated[float, typer.Option(help="per parameter, beside itself and its gradient")] = 8.0,
    out: Annotated[Path | None, typer.Option("--json", help="write the results to this file too")] = None,
) -> None:
    """Predict a training step of MODEL on clusters that are not there, for each policy.

    Operations and bytes come from the compiled graph, rows and replicas from what the policy makes of the routing.
    """
    try:
        clusters = [ClusterSpec.load(path) for path in cluster]
        makers = {name: _policy(name, replicas) for name in policy}
        build = _function(model)
        routing = _load_trace(trace) if trace is not None else None
        if routing is None and workload not in WORKLOADS:
            raise typer.BadParameter(f"no workload {workload!r}; there are {', '.join(WORKLOADS)}")
        results = []
        for spec in clusters:
            captured: dict[Any, Any] = {}
            for name, made in makers.items():
                results.append(
                    _run(
                        build,
                        spec,
                        name,
                        made,
                        captured,
                        routing=routing,
                        workload=workload,
                        skew=skew,
                        replicas=replicas,
                        rematerialize=rematerialize,
                        steps=steps,
                        optimizer_bytes=optimizer_bytes,
                    )  # fmt: skip
                )
    except (ClusterError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    Console(width=150).print(_table(results))
    if out is not None:
        out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def _run(
    build: Any,
    spec: ClusterSpec,
    name: str,
    policy: Policy,
    captured: dict[Any, Any],
    *,
    routing: Counts | None,
    workload: str,
    skew: float,
    replicas: int,
    rematerialize: bool,
    steps: int,
    optimizer_bytes: float,
) -> Result:
    key = policy.replicates, policy.calibrates
    if key not in captured:
        model, inputs = _build(build)
        config = Config(policy=policy, replicas=replicas, rematerialize=rematerialize)
        captured[key] = capture(model, inputs, spec, config)
    made = captured[key]
    layers = made.layers
    rows, tokens = made.rows, made.tokens
    experts = layers[0].num_experts
    if routing is None:
        counts = make(
            workload, steps=HISTORY + max(steps, 10), layers=len(layers), ranks=spec.ranks, experts=experts, rows=rows,
            skew=skew,
        )  # fmt: skip
    elif routing.shape[3] != experts:
        raise ValueError(f"the trace has {routing.shape[3]} experts, the model has {experts}")
    else:
        counts = fit(routing, layers=len(layers), ranks=spec.ranks, rows=rows)
    first = min(HISTORY, len(counts) - 1)
    wanted = sorted(set(np.linspace(first, len(counts) - 1, steps).round().astype(int).tolist()))
    hidden = hidden_seconds(tokens, made.dense_parameters, len(layers), spec.flops)
    walked = walk(
        policy, counts[: wanted[-1] + 1], [layer.owners for layer in layers], topology=spec.topology,
        rates=replace(spec.rates, hidden=hidden), sizes=made.sizes, steps=wanted,
    )  # fmt: skip
    per_expert = [layer.expert_bytes for layer in layers]
    found = []
    for _, routed in walked:
        owned = [np.asarray(r.placement.owners.counts) * size for r, size in zip(routed, per_expert, strict=True)]
        simulator = Simulator(made, spec, update=made.dense_bytes + np.sum(owned, axis=0))
        predicted = simulator.step(routed)
        memory = measure_memory(
            made.model, layers, routed, optimizer_bytes=optimizer_bytes, rematerialize=rematerialize
        )
        computed = [r.computed.sum(0) for r in routed]
        found.append(
            Result(
                cluster=spec.name,
                policy=name,
                seconds=predicted.seconds,
                exposed=float(predicted.waited.max()),
                imbalance=float(np.mean([c.max() / max(1e-9, c.mean()) for c in computed])),
                replicas=float(np.mean([r.placement.num_replicas for r in routed])),
                node_bytes=float(predicted.sent.max()),
                states=memory.states,
                replica_bytes=memory.replicas,
            )  # fmt: skip
        )
    numbers = [key for key, value in asdict(found[0]).items() if isinstance(value, float)]
    return replace(found[0], **{key: float(np.mean([getattr(f, key) for f in found])) for key in numbers})


def _table(results: list[Result]) -> Table:
    table = Table(
        "cluster", "policy", "step, ms", "times as fast", "max/mean rows", "replicas per layer", "waits, ms",
        "GB leaving a node", "GB of states", "GB of replicas",
        caption="times as fast as the first policy on the same cluster; memory of the rank with most",
    )  # fmt: skip
    first: dict[str, float] = {}
    for r in results:
        base = first.setdefault(r.cluster, r.seconds)
        table.add_row(
            r.cluster, r.policy, f"{r.seconds * 1e3:.1f}", f"{base / r.seconds:.2f}", f"{r.imbalance:.2f}",
            f"{r.replicas:.1f}", f"{r.exposed * 1e3:.1f}", f"{r.node_bytes / 1e9:.3f}", f"{r.states / 1e9:.3f}",
            f"{r.replica_bytes / 1e9:.3f}",
        )  # fmt: skip
    return table


def _policy(name: str, replicas: int) -> Policy:
    known = {
        "static": Static, "hecate": lambda: Hecate(objective="time", replicas=replicas),
        "paper": lambda: Hecate(objective="paper", replicas=replicas),
    }  # fmt: skip
    if name in known:
        return known[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise typer.BadParameter(f"no policy {name!r}; there are {', '.join(known)}, and module:Class")
    sys.path.insert(0, os.getcwd())
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"policy {name!r}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    policy = kind()
    if not isinstance(policy, Policy):
        raise typer.BadParameter(f"policy {name!r} is no hecate.Policy")
    if hasattr(policy, "replicas"):
        policy.replicas = replicas
    return policy


def _function(name: str) -> Any:
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise typer.BadParameter(f"model {name!r}: expected file.py:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path[:0] = [os.getcwd(), str(path.parent)]
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        raise typer.BadParameter(f"model {name!r}: {path} has no {attribute}")
    return getattr(module, attribute)


def _build(build: Any) -> tuple[Any, Mapping[str, Any]]:
    made = build()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
        raise typer.BadParameter("the function must return a model and a batch: (nn.Module, dict of tensors)")
    return made


def _load_trace(path: Path) -> Counts:
    try:
        with np.load(path) as archive:
            counts: Counts = archive["counts"].astype(np.int64)
    except (OSError, KeyError, ValueError) as error:
        raise typer.BadParameter(f"{path} is not a trace that hecate.record wrote: {error}") from None
    if counts.ndim != 4 or len(counts) == 0:
        raise typer.BadParameter(
            f"{path}: counts have shape {list(counts.shape)}, expected [step, layer, rank, expert]"
        )
    return counts
