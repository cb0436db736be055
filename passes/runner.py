"""Run the passes on one captured graph: the ceremony around every pass, in one place.

Switch off by name, time, verify, count, name what is new, dump. A pass itself only transforms.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch._logging import trace_structured
from torch.fx import GraphModule, Node

from hecate.passes import PASSES, Outcome, Pass, PassContext, summary_of
from hecate.passes.base import PassRecord
from hecate.passes.dumps.folder import GraphDump
from hecate.passes.dumps.printing import print_graph, text_of_lines
from hecate.passes.dumps.value_names import name_values, note_pass, short_names
from hecate.passes.invariants import verify

log = logging.getLogger("hecate")


def run_passes(
    gm: GraphModule,
    context: PassContext,
    *,
    passes: Sequence[Pass] = PASSES,
    disabled: Collection[str] = (),
    dump: GraphDump | None = None,
    check: Callable[[GraphModule], None] = verify,
    title: str = "",
) -> list[PassRecord]:
    """Apply ``passes`` in order to ``gm`` and to the bodies of its higher-order operators, in place.

    Args:
        check: called after every pass.
        title: which graph it is, for traces: "graph0_forward".

    Raises:
        InvalidGraphError: a pass broke an invariant.
    """
    layers = short_names(context.layer_names)
    for body in _bodies(gm):
        name_values(body.graph, body.graph.nodes, layers)
    if dump:
        dump.begin(gm)
    trace = _Trace(gm, context, title or context.part) if _traced() else None
    records = []
    for index, function in enumerate(passes, start=1):
        name = function.__name__
        if name in disabled:
            record = PassRecord(name=name, enabled=False, rewritten=0, skipped=(), seconds=0.0)
        else:
            before = {body: set(body.graph.nodes) for body in _bodies(gm)}
            start = time.perf_counter()
            outcomes = []
            try:
                for body in _bodies(gm):
                    outcomes.append(function(body, context))
                    check(body)
            except Exception:
                # What it looks like is what one wants to see.
                if dump:
                    dump.broken(index, name, gm)
                raise
            record = _record(name, outcomes, time.perf_counter() - start)
            for body, known in before.items():
                _name_new(body, known, name, layers)
            log.info("%02d %s: %d rewritten, %d skipped, %.0f ms", index, name, record.rewritten,
                     len(record.skipped), record.seconds * 1e3)  # fmt: skip
            if trace is not None:
                trace.after(gm, f"{index:02}_{name}")
        records.append(record)
        if dump:
            dump.after(index, record, gm, summary_of(function))
    for body in _bodies(gm):
        body.recompile()
    if dump:
        dump.end()
    return records


def send_text(name: str, text: Callable[[], str]) -> None:
    """Send a text to TORCH_TRACE, where tlparse shows it. It is made only if somebody listens."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"hecate_{name}", "encoding": "string"},
        payload_fn=text,
    )


def _name_new(body: GraphModule, known: set[Node], name: str, layers: Mapping[int, str]) -> None:
    """Say of new nodes who wrote them, and name them after what they are."""
    name_values(body.graph, note_pass(body.graph.nodes, known, name), layers)


def _bodies(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph and every graph inside it, such as the body of a checkpointed layer."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield module


def _record(name: str, outcomes: list[Outcome], seconds: float) -> PassRecord:
    return PassRecord(
        name=name,
        enabled=True,
        rewritten=sum(outcome.rewritten for outcome in outcomes),
        skipped=tuple(skip for outcome in outcomes for skip in outcome.skipped),
        seconds=seconds,
        remarks=tuple(remark for outcome in outcomes for remark in outcome.remarks),
    )


def _traced() -> bool:
    """Whether somebody reads what ``send_text`` sends: to print graphs takes time."""
    return bool(logging.getLogger("torch.__trace").handlers)


class _Trace:
    """Sends the graph that came in, and the graph and the difference after each pass that changed it."""

    def __init__(self, gm: GraphModule, context: PassContext, title: str) -> None:
        self.context, self.title = context, title
        self.text = self._print(gm)
        send_text(f"{title}_00_before", lambda: self.text)

    def _print(self, gm: GraphModule) -> str:
        layers, names = short_names(self.context.layer_names), self.context.layer_names
        return text_of_lines(print_graph(gm, layers, names, part=self.context.part))

    def after(self, gm: GraphModule, name: str) -> None:
        before, self.text = self.text, self._print(gm)
        if before == self.text:
            return
        lines = difflib.unified_diff(before.splitlines(), self.text.splitlines(), "before", "after", lineterm="", n=3)
        difference = "\n".join(lines)
        send_text(f"{self.title}_{name}", lambda: self.text)
        send_text(f"{self.title}_{name}.diff", lambda: difference)
