"""Policies by name, as ``hecate simulate`` and ``hecate replay`` take them."""

from __future__ import annotations

from typing import Annotated

import typer

from hecate.commands.load_name import load_name, users_code
from hecate.runtime.placement.hecate_policy import Hecate, Replicas
from hecate.runtime.placement.policy import Policy, Static

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
