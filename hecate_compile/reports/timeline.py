"""A step as a Chrome trace: when each collective ran, and when compute stood still for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hecate.runtime.comm.queue import Span


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
