"""Graph dumps on disk: what went in, what each pass changed, and a page that walks through it.

    rank0/index.html
    rank0/graph0/00_model.py                 what Dynamo captured
    rank0/graph0/12_exchange_rows.py, .diff  what a pass made of it, where it changed something
    rank0/graph0/joint/, forward/, backward/ the same behind autograd
    rank0/graph0/schedule.txt                what travels, behind how much compute
    rank0/graph0/layer_before.svg, layer_after.svg

A graph is printed once for every pass; nothing is written for a pass that changed no line.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.fx import GraphModule

from hecate.passes.base import PassRecord
from hecate.passes.dumps.drawing import Picture, picture_of
from hecate.passes.dumps.page import page
from hecate.passes.dumps.printing import Line, print_graph, text_of_lines
from hecate.passes.dumps.steps import DumpedPart, Step
from hecate.passes.dumps.value_names import short_names

MOST_BYTES = 4 * 2**20


class DumpFolder:
    """The dumps of one model on one rank.

    Args:
        folder: for this rank alone; graphs of an earlier run in it are replaced.
        names: module name of each layer id, in model order.
        most_bytes: longest file; what is beyond is cut, and the file says so.
    """

    def __init__(self, folder: Path, names: Mapping[int, str] | None = None, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.names, self.most_bytes = folder, dict(names or {}), most_bytes
        self.parts: list[DumpedPart] = []
        folder.mkdir(parents=True, exist_ok=True)

    def part(self, graph: int, part: str = "") -> GraphDump:
        """A dump of one part of graph number ``graph``."""
        return GraphDump(self, graph, part)

    def write(self, file: str, text: str) -> None:
        """Write a file, cut to its longest."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(cut(text, self.most_bytes))

    def write_page(self) -> None:
        """``index.html``, with all that was dumped so far."""
        # Not cut: half a page is none. It cuts the graphs in it itself.
        (self.folder / "index.html").write_text(page(self.parts, self.folder.name))


def cut(text: str, most: int) -> str:
    """The lines that fit, and one that says what is missing."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    kept = encoded[:most].decode(errors="ignore").rpartition("\n")[0]
    missing = text.count("\n") - kept.count("\n") - 1
    how = "HECATE_DUMP_MB=N allows N MB a file"
    return f"{kept}\n# cut here: {missing} more lines, {len(encoded) - most} bytes; {how}\n"


class GraphDump:
    """Writes one part of a graph: what came in, and what each pass changed."""

    def __init__(self, owner: DumpFolder, graph: int, part: str = "") -> None:
        self.owner, self.part = owner, part
        self.base = f"graph{graph}/{part}/" if part else f"graph{graph}/"
        self.dumped = DumpedPart(graph=graph, part=part)
        self._lines: list[Line] = []
        self._pictures: list[Picture] = []

    def begin(self, gm: GraphModule) -> None:
        """Dump what came in."""
        if not self.part:
            # An earlier run may have had other passes, or changed others.
            shutil.rmtree(self.owner.folder / self.base, ignore_errors=True)
        self.owner.parts = [
            one for one in self.owner.parts if (one.graph, one.part) != (self.dumped.graph, self.part)
        ]  # fmt: skip
        self.owner.parts.append(self.dumped)
        self._lines = self._printed(gm)
        name = "model" if not self.part else "from_autograd"
        self._draw(gm)
        file = self._write(0, name, text_of_lines(self._lines))
        self.dumped.steps.append(Step(index=0, name=name, file=file, lines=self._lines))

    def after(self, index: int, record: PassRecord, gm: GraphModule, summary: str = "") -> None:
        """Dump what a pass changed."""
        lines = self._printed(gm) if record.enabled else self._lines
        before, now = ([line.text for line in graph] for graph in (self._lines, lines))
        file, diff = "", list[str]()
        if before != now:
            diff = list(difflib.unified_diff(before, now, "before", f"after {record.name}", lineterm="", n=3))
            file = self._write(index, record.name, text_of_lines(lines))
            self.owner.write(file.replace(".py", ".diff"), "\n".join(diff) + "\n")
            self._draw(gm)
        self.dumped.steps.append(
            Step(
                index=index, name=record.name, file=file, record=record, summary=summary,
                lines=lines if file else (), diff=diff,
            )
        )  # fmt: skip
        self._lines = lines

    def broken(self, index: int, name: str, gm: GraphModule) -> None:
        """Write the graph that a failed pass left behind, and the page as far as it went."""
        self._write(index, f"{name}.broken", text_of_lines(self._printed(gm)))
        self.end()

    def end(self) -> None:
        """Draw one layer, and write the page anew."""
        if not self.part and self._pictures:
            # As it was before its rows were exchanged, and as it is in the end.
            exchanged = next((i for i, one in enumerate(self._pictures) if one.exchanges), None)
            self.dumped.before = self._pictures[exchanged - 1 if exchanged else 0]
            if exchanged is not None:
                self.dumped.after = self._pictures[-1]
            for name, picture in (("before", self.dumped.before), ("after", self.dumped.after)):
                if picture is not None:
                    # Not cut: half a drawing is none.
                    (self.owner.folder / f"{self.base}layer_{name}.svg").write_text(picture.svg())
        self.owner.write_page()

    def write_schedule(self, lines: Sequence[str]) -> None:
        """Add this part's lines to ``schedule.txt``, and to the page."""
        self.dumped.schedule = list(lines)
        graph = self.dumped.graph
        parts = [line for one in self.owner.parts if one.graph == graph for line in one.schedule]
        self.owner.write(f"graph{graph}/schedule.txt", "\n".join(parts) + "\n")
        self.owner.write_page()

    def _printed(self, gm: GraphModule) -> list[Line]:
        return print_graph(gm, short_names(self.owner.names), self.owner.names, part=self.part)

    def _write(self, index: int, name: str, text: str) -> str:
        file = f"{self.base}{index:02}_{name}.py"
        self.owner.write(file, text)
        return file

    def _draw(self, gm: GraphModule) -> None:
        picture = picture_of(gm, short_names(self.owner.names)) if not self.part else None
        if picture is not None:
            self._pictures.append(picture)
