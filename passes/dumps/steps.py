"""Steps of a graph's dump: one for each pass."""

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
        index: place of the pass in its list; 0 for the graph that came in.
        record: what the pass did; None for the graph that came in, and for one that a failed pass left behind.
        summary: what the pass does.
        lines: the graph; empty if the pass changed nothing.
        diff: the lines of the unified diff.
    """

    index: int
    name: str
    record: PassRecord | None = None
    summary: str = ""
    lines: Sequence[Line] = ()
    diff: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Name of the step, such as ``11_exchange_rows``."""
        return f"{self.index:02}_{self.name}"


@dataclass(kw_only=True)
class DumpedPart:
    """All steps of one part of a graph; "" is the part that Dynamo captured."""

    graph: int
    part: str
    steps: list[Step] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    before: Picture | None = None
    after: Picture | None = None

    @property
    def folder(self) -> str:
        """Folder of its files in the folder of its rank."""
        return f"graph{self.graph}/{self.part}/" if self.part else f"graph{self.graph}/"

    def file(self, step: Step, kind: str = "py") -> str:
        """Return the name of a file of one step."""
        return f"{self.folder}{step.title}.{kind}"
