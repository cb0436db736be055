"""What was dumped of a graph: a step for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hecate.passes.base import PassRecord
from hecate.passes.dumps.drawing import Picture
from hecate.passes.dumps.printing import Line


@dataclass(frozen=True, kw_only=True)
class Step:
    """A graph as it was dumped.

    Attributes:
        index: place of the pass in its list; 0 is what came in.
        file: the graph's file in the folder of its rank; "" if nothing was written.
        record: what the pass did; None for what came in.
        summary: what the pass does.
        lines: the graph; empty if the pass changed nothing.
        diff: the lines of the unified diff.
    """

    index: int
    name: str
    file: str = ""
    record: PassRecord | None = None
    summary: str = ""
    lines: Sequence[Line] = ()
    diff: Sequence[str] = ()


@dataclass(kw_only=True)
class DumpedPart:
    """All steps of one part of a graph; "" is the part that Dynamo captured."""

    graph: int
    part: str
    steps: list[Step] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    before: Picture | None = None
    after: Picture | None = None
