"""Logs of graphs on their way through the passes: printed and compared once after each, for all readers."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch.fx import GraphModule

from hecate.passes.base import PassRecord
from hecate.passes.dumps.harmless import harmless
from hecate.passes.dumps.printing import Line, print_graph, text_of_lines
from hecate.passes.dumps.steps import Step
from hecate.passes.dumps.value_names import short_names
from hecate.private import trace_structured


class Reader(Protocol):
    """A reader of one part of a graph."""

    def take(self, step: Step, gm: GraphModule) -> None:
        """Take the graph that came in, or a pass's result."""

    def schedule(self, lines: Sequence[str]) -> None:
        """Take lines of collectives, behind how much compute each is."""

    def end(self) -> None:
        """Note that all passes have run, or one has failed."""

    def break_off(self) -> None:
        """Note that something failed in the log itself, and nothing more is told."""


class GraphLog:
    """Tells readers what passes do to one part of a graph. An error in it ends the log, and not the compile.

    Args:
        names: module name of each layer id, in model order.
        part: "joint", "forward", "backward", or "" for what Dynamo captured.
    """

    def __init__(self, names: Mapping[int, str], part: str, readers: Sequence[Reader]) -> None:
        self._names, self._part, self._readers = names, part, tuple(readers)
        self._lines: Sequence[Line] = ()

    def begin(self, gm: GraphModule) -> None:
        """Tell readers the graph that came in."""

        def tell() -> None:
            self._lines = self._printed(gm)
            name = "from_autograd" if self._part else "model"
            self._send(Step(index=0, name=name, lines=self._lines), gm)

        self._try(tell)

    def after(self, index: int, record: PassRecord, gm: GraphModule, summary: str = "") -> None:
        """Tell readers what a pass changed."""

        def tell() -> None:
            lines = self._printed(gm) if record.enabled else self._lines
            before, now = ([line.text for line in graph] for graph in (self._lines, lines))
            changed = before != now
            diff = difflib.unified_diff(before, now, "before", f"after {record.name}", lineterm="", n=3)
            self._lines = lines
            self._send(
                Step(
                    index=index,
                    name=record.name,
                    record=record,
                    summary=summary,
                    lines=lines if changed else (),
                    diff=list(diff) if changed else (),
                ),
                gm,
            )

        self._try(tell)

    def broken(self, index: int, name: str, gm: GraphModule) -> None:
        """Tell readers what a failed pass left behind, as far as it can be printed."""
        self._try(lambda: self._send(Step(index=index, name=f"{name}.broken", lines=self._printed(gm)), gm))
        self.end()

    def end(self) -> None:
        """Tell readers that this was all."""

        def tell() -> None:
            for reader in self._readers:
                reader.end()

        self._try(tell)

    def schedule(self, lines: Sequence[str]) -> None:
        """Tell readers the collectives, and behind how much compute each is."""

        def tell() -> None:
            for reader in self._readers:
                reader.schedule(lines)

        self._try(tell)

    def _try(self, tell: Callable[[], None]) -> None:
        def stop() -> None:
            for reader in self._readers:
                reader.break_off()
            self._readers = ()

        if self._readers:
            with harmless("dump of this graph", stop):
                tell()

    def _printed(self, gm: GraphModule) -> list[Line]:
        return print_graph(gm, short_names(self._names), self._names, part=self._part)

    def _send(self, step: Step, gm: GraphModule) -> None:
        for reader in self._readers:
            reader.take(step, gm)


def graph_log(graph: int, part: str, names: Mapping[int, str], readers: Sequence[Reader] = ()) -> GraphLog | None:
    """Return the log of one part of graph number ``graph`` for ``readers`` and TORCH_TRACE.

    It is None if there is no reader, for to print graphs takes time.
    """
    if logging.getLogger("torch.__trace").handlers:
        readers = (*readers, _Trace(f"graph{graph}_{part}" if part else f"graph{graph}"))
    return GraphLog(names, part, readers) if readers else None


class _Trace:
    """Sends graphs, differences and schedules to TORCH_TRACE, where tlparse shows them."""

    def __init__(self, title: str) -> None:
        self._title = title

    def take(self, step: Step, gm: GraphModule) -> None:
        if step.lines:
            _send_text(f"{self._title}_{step.title}", lambda: text_of_lines(step.lines))
        if step.diff:
            _send_text(f"{self._title}_{step.title}.diff", lambda: "\n".join(step.diff))

    def schedule(self, lines: Sequence[str]) -> None:
        _send_text(f"{self._title}_schedule", lambda: "\n".join(lines))

    def end(self) -> None:
        pass

    def break_off(self) -> None:
        pass


def _send_text(name: str, text: Callable[[], str]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"hecate_{name}", "encoding": "string"},
        payload_fn=text,
    )
