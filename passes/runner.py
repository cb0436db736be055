"""Run the passes on one captured graph: the ceremony around every pass, in one place.

Switch off by name, time, verify, count, dump. A pass itself only transforms.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch._logging import trace_structured
from torch.fx import GraphModule

from hecate.passes import PASSES, Outcome, Pass, PassContext, Remark, Skip
from hecate.passes.invariants import verify

log = logging.getLogger("hecate")

# Files sort in run order: Dynamo's graph, then these.
_PARTS = {"": "", "joint": "a-", "forward": "b-", "backward": "c-"}


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One pass on one graph.

    Attributes:
        seconds: time it took, verification included.
    """

    name: str
    enabled: bool
    rewritten: int
    skipped: tuple[Skip, ...]
    seconds: float
    remarks: tuple[Remark, ...] = ()


class GraphDump:
    """Writes a graph before and after each pass into ``folder``, in files that sort in run order.

    Args:
        part: which part of the graph it is, once there are several: "joint", "forward", "backward".
    """

    def __init__(self, folder: Path, graph: int, part: str = "") -> None:
        self.folder = folder
        self.stem = f"graph{graph:03}.{_PARTS[part]}{part}".rstrip(".")
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, index: int, name: str, before: str, after: str) -> None:
        stem = f"{self.stem}.{index:02}.{name}"
        diff = "\n".join(
            difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2)
        )
        for suffix, text in (("1.before.py", before), ("2.after.py", after), ("3.diff", diff)):
            (self.folder / f"{stem}.{suffix}").write_text(text + "\n")

    def write_text(self, name: str, lines: Sequence[str]) -> None:
        (self.folder / f"{self.stem}.{name}.txt").write_text("\n".join(lines) + "\n")


def run_passes(
    gm: GraphModule,
    context: PassContext,
    *,
    passes: Sequence[Pass] = PASSES,
    disabled: Collection[str] = (),
    dump: GraphDump | None = None,
    check: Callable[[GraphModule], None] = verify,
) -> list[PassRecord]:
    """Apply ``passes`` in order to ``gm`` and to the bodies of its higher-order operators, in place.

    Args:
        check: called after every pass.

    Raises:
        InvalidGraphError: a pass broke an invariant.
    """
    records = []
    for index, function in enumerate(passes, start=1):
        name = function.__name__
        if name in disabled:
            records.append(PassRecord(name=name, enabled=False, rewritten=0, skipped=(), seconds=0.0))
            continue
        before = _readable(gm) if dump else ""
        start = time.perf_counter()
        outcomes = []
        for body in _bodies(gm):
            outcomes.append(function(body, context))
            check(body)
        record = _record(name, outcomes, time.perf_counter() - start)
        records.append(record)
        log.info("%02d %s: %d rewritten, %d skipped, %.0f ms", index, name, record.rewritten,
                 len(record.skipped), record.seconds * 1e3)  # fmt: skip
        if dump:
            dump.write(index, name, before, _readable(gm))
        _trace_structured(index, name, gm)
    for body in _bodies(gm):
        body.recompile()
    return records


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


def _readable(gm: GraphModule) -> str:
    return gm.print_readable(print_output=False, include_stride=False)


def _trace_structured(index: int, name: str, gm: GraphModule) -> None:
    """Send the graph to TORCH_TRACE, where tlparse shows it."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"hecate_{index:02}_{name}", "encoding": "string"},
        payload_fn=lambda: _readable(gm),
    )
