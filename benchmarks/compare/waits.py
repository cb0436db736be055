"""For what a rank's compute stood still in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hecate.runtime.ops import collective_named

_KINDS = {
    "rows": "rows",
    "counts": "counts",
    "tickets": "counts",
    "replicas": "experts",
    "experts": "experts",
    "dense": "dense gradients",
    "bucket": "dense gradients",
    "fractions": "counts",
}
KINDS = tuple(dict.fromkeys(_KINDS.values()))


def kind_of(operator: str) -> str:
    """What a collective carries, one of :data:`KINDS`."""
    return _KINDS[collective_named(operator).carries]


def seconds_waited(spans: Iterable[Sequence[Any]]) -> dict[str, float]:
    """By kind, from spans ``(part, operator, begun, ended, waited, ready)`` of one rank.

    What the host does between asking for a collective's result and taking it, such as planning while rows travel,
    is in the seconds of that collective.
    """
    found = dict.fromkeys(KINDS, 0.0)
    for _, operator, _, _, waited, ready in spans:
        # One that nobody asked for has neither.
        found[kind_of(operator)] += max(0.0, ready - waited)
    return found
