"""The collectives of the last step, compared with their predictions, and as a Chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hecate.runtime.comm.collective import Carries, collective_named
from hecate.runtime.comm.queue import Span
from hecate.runtime.state.layer import Layer


@dataclass(frozen=True, kw_only=True)
class Travel:
    """The collectives of one kind for one layer or its parameters, in "forward" or "backward".

    Seconds are ``predicted``, of compute meanwhile (``behind``), measured, and ``exposed``, in which the compute
    stood still; the last two are None before the collectives have run.
    """

    part: str
    subject: str
    operator: str
    count: int
    predicted: float
    behind: float
    took: float | None
    exposed: float | None
    predicted_bytes: float


def travels(spans: Iterable[Span]) -> tuple[Travel, ...]:
    """Group the collectives of a step, in the order of their first starts."""
    groups: dict[tuple[str, str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.part, span.subject, span.operator), []).append(span)
    return tuple(
        Travel(
            part=part,
            subject=subject,
            operator=operator,
            count=len(group),
            predicted=sum(span.predicted for span in group),
            behind=sum(span.behind for span in group),
            took=_total(group, "seconds"),
            exposed=_total(group, "exposed"),
            predicted_bytes=sum(span.predicted_bytes for span in group),
        )
        for (part, subject, operator), group in groups.items()
    )


def _total(spans: Sequence[Span], name: str) -> float | None:
    return sum(getattr(span, name) for span in spans) if all(span.ready for span in spans) else None


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes that this rank sent for one layer in the last step, forward and backward, and their prediction.

    ``replica_bytes`` is the mean over ranks, ``most_replica_bytes`` what a rank may hold.
    """

    layer: str
    predicted_rows: float
    rows: int
    predicted_experts: float
    experts: int
    replica_bytes: float
    most_replica_bytes: float


def layer_bytes(layers: Sequence[Layer], found: Iterable[Travel], slots: int) -> tuple[LayerBytes, ...]:
    """Return the bytes of every layer, of which a rank may hold ``slots`` replicas."""
    found = list(found)

    def predicted(layer: Layer, carries: Carries) -> float:
        return sum(
            one.predicted_bytes
            for one in found
            if one.subject == layer.name and collective_named(one.operator).carries == carries
        )

    layers = list(dict.fromkeys(layers))
    for layer in layers:
        layer.read_rows()
    return tuple(
        LayerBytes(
            layer=layer.name,
            predicted_rows=predicted(layer, "rows"),
            rows=layer.bytes_sent,
            predicted_experts=predicted(layer, "replicas"),
            experts=layer.expert_bytes_sent,
            replica_bytes=layer.replicas * layer.sizes.expert_bytes / layer.world.size,
            most_replica_bytes=slots * layer.sizes.expert_bytes,
        )
        for layer in layers
    )


def write_timeline(spans: Iterable[Span], path: str | os.PathLike[str], rank: int) -> None:
    """Write a rank's collectives and waits in the Trace Event Format, which Perfetto and chrome://tracing open."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "collectives"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "compute stands still"}},
    ]
    for span in spans:
        name = f"{span.operator} {span.subject}"
        for line, start, seconds in ((0, span.begun, span.seconds), (1, span.waited, span.exposed)):
            events.append(
                {"ph": "X", "name": name, "pid": rank, "tid": line, "ts": start * 1e6, "dur": seconds * 1e6}
            )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"traceEvents": events}))
