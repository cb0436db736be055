"""Graph dumps: the graph that went in, the changes of each pass, and a page that walks through it.

    rank0/index.html
    rank0/make_loops_traceable.diff          what was changed in the model's code, if anything was
    rank0/graph0/00_model.py                 what Dynamo captured
    rank0/graph0/14_exchange_rows.py, .diff  what a pass made of it, where it changed something
    rank0/graph0/joint/, forward/, backward/ the same after autograd
    rank0/graph0/schedule.txt                what travels, behind how much compute
    rank0/graph0/layer_before.svg, layer_after.svg

A graph is printed once for every pass, for the folder and for TORCH_TRACE, where tlparse shows it; nothing is written
for a pass that changed no line.
"""

from __future__ import annotations

import difflib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from torch.fx import GraphModule

from hecate.passes.base import PassRecord
from hecate.passes.dumps.drawing import Picture, picture_of
from hecate.passes.dumps.page import DumpedPart, PartOfPage, Step, page, part_of_page
from hecate.passes.dumps.printing import Line, print_graph, text_of_lines
from hecate.passes.dumps.value_names import short_names
from hecate.private import trace_structured
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

    def write(self, file: str, text: str, *, whole: bool = False) -> None:
        """Write a file, cut to its longest unless it is of use only as a ``whole``."""
        if self.failed:
            return
        path = self.folder / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if whole else _cut(text, self.most_bytes), encoding="utf-8")
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


def _cut(text: str, most: int) -> str:
    """Return the lines that fit, and one that says what is missing."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    kept = encoded[:most].decode(errors="ignore").rpartition("\n")[0]
    missing = text.count("\n") - kept.count("\n") - 1
    how = "HECATE_DUMP_MB=N allows N MB a file"
    return f"{kept}\n# cut here: {missing} more lines, {len(encoded) - most} bytes; {how}\n"


def graph_log(graph: int, part: str, names: Mapping[int, str], folder: DumpFolder | None) -> GraphLog | None:
    """Return the log of one part of graph number ``graph``; None if nobody reads it, for printing takes time."""
    folder = None if folder is None or folder.failed else folder
    read = folder is not None or logging.getLogger("torch.__trace").handlers
    return GraphLog(DumpedPart(graph=graph, part=part), names, folder) if read else None


@contextmanager
def harmless(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn an error of the block into a warning: on one rank it must not end a compile that the others wait for."""
    try:
        yield
    except Exception as error:
        otherwise()
        warn_alone(f"hecate: no {what} from here on: {type(error).__name__}: {error}", stacklevel=3)


_P = ParamSpec("_P")


def _unless_ended(method: Callable[Concatenate[GraphLog, _P], None]) -> Callable[Concatenate[GraphLog, _P], None]:
    @wraps(method)
    def told(self: GraphLog, *args: _P.args, **options: _P.kwargs) -> None:
        if not self.ended:
            with harmless("dump of this graph", self.break_off):
                method(self, *args, **options)

    return told


class GraphLog:
    """Writes what passes do to one part of a graph. An error in it ends the log, and not the compile."""

    def __init__(self, dumped: DumpedPart, names: Mapping[int, str], folder: DumpFolder | None) -> None:
        self._dumped, self._names, self._folder, self.ended = dumped, names, folder, False
        self._lines: Sequence[Line] = ()
        self._pictures: list[Picture] = []

    @_unless_ended
    def begin(self, gm: GraphModule) -> None:
        """Write the graph that came in."""
        self._lines = self._printed(gm)
        self._write(Step(index=0, name="from_autograd" if self._dumped.part else "model", lines=self._lines), gm)

    @_unless_ended
    def after(self, index: int, record: PassRecord, gm: GraphModule, summary: str = "") -> None:
        """Write what a pass changed."""
        lines = self._printed(gm) if record.enabled else self._lines
        before, now = ([line.text for line in graph] for graph in (self._lines, lines))
        diff = list(difflib.unified_diff(before, now, "before", f"after {record.name}", lineterm="", n=3))
        self._lines = lines
        step = Step(
            index=index, name=record.name, record=record, summary=summary, lines=lines if diff else (), diff=diff
        )
        self._write(step, gm)

    @_unless_ended
    def broken(self, index: int, name: str, gm: GraphModule) -> None:
        """Write what a failed pass left behind, as far as it can be printed."""
        self._write(Step(index=index, name=f"{name}.broken", lines=self._printed(gm)), gm)
        self.end()

    @_unless_ended
    def end(self) -> None:
        """Draw one layer, and write the page anew."""
        if self._folder is None:
            return
        exchanged = next((i for i, one in enumerate(self._pictures) if one.exchanges), None)
        if exchanged is not None:
            self._dumped.after = self._pictures[-1]
        # The layer is drawn as it was before its rows were exchanged, which a graph that came with them exchanged
        # does not tell.
        if self._pictures and exchanged != 0:
            self._dumped.before = self._pictures[exchanged - 1 if exchanged else 0]
        for name, picture in (("before", self._dumped.before), ("after", self._dumped.after)):
            if picture is not None:
                self._folder.write(f"{self._dumped.folder}layer_{name}.svg", picture.svg, whole=True)
        self._folder.show(self._dumped)

    @_unless_ended
    def schedule(self, lines: Sequence[str]) -> None:
        """Write the collectives, behind how much compute each is."""
        self._trace("schedule", lambda: "\n".join(lines))
        if self._folder is not None:
            self._dumped.schedule = list(lines)
            self._folder.show(self._dumped)

    def break_off(self) -> None:
        """End the log: the rest of this part is missing."""
        self.ended = True
        if self._folder is not None:
            self._folder.whole = False

    def _printed(self, gm: GraphModule) -> list[Line]:
        return print_graph(gm, short_names(self._names), self._names, part=self._dumped.part)

    def _write(self, step: Step, gm: GraphModule) -> None:
        if step.lines:
            self._trace(step.title, lambda: text_of_lines(step.lines))
        if step.diff:
            self._trace(f"{step.title}.diff", lambda: "\n".join(step.diff))
        if self._folder is None:
            return
        self._dumped.steps.append(step)
        if step.lines:
            self._folder.write(self._dumped.file(step), text_of_lines(step.lines))
            if not self._dumped.part and (picture := picture_of(gm, short_names(self._names))) is not None:
                self._pictures.append(picture)
        if step.diff:
            self._folder.write(self._dumped.file(step, "diff"), "\n".join(step.diff) + "\n")

    def _trace(self, name: str, text: Callable[[], str]) -> None:
        part = f"_{self._dumped.part}" if self._dumped.part else ""
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"hecate_graph{self._dumped.graph}{part}_{name}", "encoding": "string"},
            payload_fn=text,
        )
