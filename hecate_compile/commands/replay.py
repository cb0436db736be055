"""``hecate replay``: the routing of a run through other policies; and policies by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from hecate.commands.built import load_name, users_code
from hecate.commands.console import console
from hecate.runtime.placement.hecate_policy import Hecate, Replicas
from hecate.runtime.placement.policy import Policy, Static
from hecate.runtime.placement.topology import Topology
from hecate.simulator.replay import load_recorded
from hecate.simulator.replay import replay as replay_trace
from hecate.simulator.workloads import load_trace

PolicyNames = Annotated[
    list[str], typer.Option(help="static, hecate, paper, or file.py:Class of your own; several times")
]
MOST_REPLICAS = "most replicas on a rank; auto: as many as are predicted to pay"


def replicas_of(text: str) -> Replicas:
    """Read a number of replicas, or ``auto``; BadParameter if it is neither."""
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise typer.BadParameter(f"--replicas {text}: expected auto, or a whole number of at least 0")
    return int(text)


def policy_named(name: str, replicas: Replicas) -> Policy:
    """Make a policy; BadParameter if there is none of this name."""
    known = {
        "static": Static,
        "hecate": lambda: Hecate(objective="time", replicas=replicas),
        "paper": lambda: Hecate(objective="paper", replicas=replicas),
    }
    if name in known:
        return known[name]()
    if ":" not in name:
        raise typer.BadParameter(f"no policy {name!r}; there are {', '.join(known)}, and file.py:Class")
    kind = load_name(name, "policy", "Class")
    if not isinstance(kind, type) or not issubclass(kind, Policy):
        raise typer.BadParameter(f"policy {name!r} is no hecate.Policy")
    with users_code(f"policy {name!r}", name.rpartition(":")[0]):
        policy = kind()
    if hasattr(policy, "replicas") and replicas != "auto":
        policy.replicas = replicas
    return policy


def replay(
    trace: Annotated[Path, typer.Argument(help="routing that hecate.record wrote")],
    policy: PolicyNames = ["static", "hecate"],  # noqa: B006  typer copies it
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes of equal size; by default those of the run")] = None,
    replicas: Annotated[str, typer.Option(help=MOST_REPLICAS)] = "auto",
) -> None:
    """Play the routing of a run back, for each policy, with the run's own model, ranks and rates.

    Ends with code 0; 2 if the trace or an option cannot be used.

    Example: hecate replay trace.npz --policy static --policy hecate --nodes 2
    """
    try:
        most = replicas_of(replicas)
        counts, owners = load_trace(trace)
        recorded = load_recorded(trace)
        steps, layers, ranks, experts = counts.shape
        if nodes is not None and ranks % nodes:
            raise typer.BadParameter(f"--nodes {nodes} does not divide the {ranks} ranks of {trace}")
        topology = Topology.even(ranks, ranks // nodes) if nodes is not None else recorded.topology
        policies = {name: policy_named(name, most) for name in policy}
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    results = {
        name: replay_trace(counts, owners, one, topology, rates=recorded.rates, sizes=recorded.sizes)
        for name, one in policies.items()
    }
    table = Table(
        "policy",
        "max/mean rows",
        "99th percentile",
        "replicas per layer",
        "rows leaving a node",
        "owners changed",
        "ms of a layer",
        "times as fast",
        title=f"{trace.name}: {steps} steps, {layers} layers, {ranks} ranks on {topology.num_nodes} node(s), "
        f"{experts} experts",
        caption="predicted for what experts compute and send; times as fast as the first policy",
    )
    first = results[policy[0]].seconds.mean()
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.imbalance.mean():.2f}",
            f"{np.percentile(result.imbalance, 99):.2f}",
            f"{result.replicas.mean():.1f}",
            f"{result.crossing.sum() / max(1, result.rows.sum()):.0%}",
            str(result.moved),
            f"{result.seconds.mean() * 1e3:.3f}",
            f"{first / result.seconds.mean():.2f}",
        )
    console(150).print(table)
