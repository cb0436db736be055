"""Graph dumps on disk: the graph that went in, the changes of each pass, and a page that walks through it.

    rank0/index.html
    rank0/make_loops_traceable.diff          what was changed in the model's code, if anything was
    rank0/graph0/00_model.py                 what Dynamo captured
    rank0/graph0/12_exchange_rows.py, .diff  what a pass made of it, where it changed something
    rank0/graph0/joint/, forward/, backward/ the same after autograd
    rank0/graph0/schedule.txt                what travels, behind how much compute
    rank0/graph0/layer_before.svg, layer_after.svg

A graph is printed once for every pass (``graph_log``); nothing is written for a pass that changed no line.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.fx import GraphModule

from hecate.passes.dumps.drawing import Picture, picture_of
from hecate.passes.dumps.graph_log import GraphLog, graph_log
from hecate.passes.dumps.page import PartOfPage, page, part_of_page
from hecate.passes.dumps.printing import text_of_lines
from hecate.passes.dumps.steps import DumpedPart, Step
from hecate.passes.dumps.value_names import short_names
from hecate.runtime.comm.warn import warn_alone

MOST_BYTES = 4 * 2**20
# The page has many graphs, and a browser has to open it.
_PAGE_OF_FILES = 4


class DumpFolder:
    """The dumps of one model on one rank. Once nothing can be written any more, a warning says so, and nothing is.

    Args:
        folder: for this rank and model alone (:func:`own_folder`).
        most_bytes: longest file; the rest is cut, and the file says so. The page may have four times as much.

    Attributes:
        failed: something could not be written.
        whole: nothing is missing, for this reason or another.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes, self.failed, self.whole = folder, most_bytes, False, True
        self._page: dict[tuple[int, str], PartOfPage] = {}
        self._schedules: dict[tuple[int, str], Sequence[str]] = {}

    def part(self, graph: int, part: str = "", names: Mapping[int, str] | None = None) -> GraphLog | None:
        """Return the log of one part of graph number ``graph``, which is written here; None after a failure.

        Args:
            part: "joint", "forward", "backward", or "" for what Dynamo captured.
            names: module name of each layer id, in model order.
        """
        names = names or {}
        dump = GraphDump(self, DumpedPart(graph=graph, part=part), names)
        return graph_log(graph, part, names, () if self.failed else (dump,))

    def write(self, file: str, text: str, *, whole: bool = False) -> None:
        """Write a file, cut to its longest unless it is of use only as a ``whole``."""
        if self.failed:
            return
        path = self.folder / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if whole else cut(text, self.most_bytes), encoding="utf-8")
        except OSError as error:
            # Perhaps this rank alone fails to write, and the others wait for it.
            self.failed, self.whole = True, False
            warn_alone(
                f"hecate: the dump in {self.folder} ends here, the training goes on: {path.name}: {error}",
                stacklevel=2,
            )

    def show(self, part: DumpedPart) -> None:
        """Add a part to ``index.html``, with all that was dumped before, and its schedule to that of the graph."""
        place = (part.graph, part.part)
        self._page.pop(place, None)
        left = _PAGE_OF_FILES * self.most_bytes - sum(len(one.html) for one in self._page.values())
        self._page[place] = part_of_page(part, most=left)
        self.write("index.html", page(list(self._page.values()), self.folder.name), whole=True)
        if part.schedule:
            self._schedules[place] = part.schedule
            lines = [line for (graph, _), own in self._schedules.items() if graph == part.graph for line in own]
            self.write(f"graph{part.graph}/schedule.txt", "\n".join(lines) + "\n")


# Number of models of this process that dump into a folder.
_models: dict[Path, int] = {}


def own_folder(folder: Path) -> Path:
    """Return ``folder``, or one beside it for the second model of this process: ``rank0-model2``.

    Graphs of an earlier run in it are removed: they may be more than this one has, and of other passes.
    """
    number = _models[folder.resolve()] = _models.get(folder.resolve(), 0) + 1
    old = list(folder.parent.glob(f"{folder.name}-model[0-9]*")) if number == 1 else []
    if number > 1:
        folder = folder.with_name(f"{folder.name}-model{number}")
    for path in (*old, *folder.glob("graph[0-9]*")):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.diff"):
        path.unlink(missing_ok=True)
    return folder


def cut(text: str, most: int) -> str:
    """Return the lines that fit, and one that says what is missing."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    kept = encoded[:most].decode(errors="ignore").rpartition("\n")[0]
    missing = text.count("\n") - kept.count("\n") - 1
    how = "HECATE_DUMP_MB=N allows N MB a file"
    return f"{kept}\n# cut here: {missing} more lines, {len(encoded) - most} bytes; {how}\n"


class GraphDump:
    """Writes one part of a graph: the graph that came in, and the changes of each pass."""

    def __init__(self, owner: DumpFolder, dumped: DumpedPart, names: Mapping[int, str]) -> None:
        self._owner, self._dumped, self._layers = owner, dumped, short_names(names)
        self._pictures: list[Picture] = []

    def take(self, step: Step, gm: GraphModule) -> None:
        """Write a step, if it changed something."""
        self._dumped.steps.append(step)
        if step.lines:
            self._owner.write(self._dumped.file(step), text_of_lines(step.lines))
            picture = picture_of(gm, self._layers) if not self._dumped.part else None
            if picture is not None:
                self._pictures.append(picture)
        if step.diff:
            self._owner.write(self._dumped.file(step, "diff"), "\n".join(step.diff) + "\n")

    def end(self) -> None:
        """Draw one layer, and write the page anew."""
        exchanged = next((i for i, one in enumerate(self._pictures) if one.exchanges), None)
        if exchanged is not None:
            self._dumped.after = self._pictures[-1]
        # The layer is drawn as it was before its rows were exchanged, which a graph that came with them exchanged
        # does not tell.
        if self._pictures and exchanged != 0:
            self._dumped.before = self._pictures[exchanged - 1 if exchanged else 0]
        for name, picture in (("before", self._dumped.before), ("after", self._dumped.after)):
            if picture is not None:
                self._owner.write(f"{self._dumped.folder}layer_{name}.svg", picture.svg(), whole=True)
        self._owner.show(self._dumped)

    def break_off(self) -> None:
        """Remember that the rest of this part is missing."""
        self._owner.whole = False

    def schedule(self, lines: Sequence[str]) -> None:
        """Add this part's lines to ``schedule.txt``, and to the page."""
        self._dumped.schedule = list(lines)
        self._owner.show(self._dumped)
