"""Runs the passes on one captured graph: the ceremony around every pass, in one place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from torch.fx import GraphModule

from hecate.passes import PASSES, Pass, PassContext, summary_of
from hecate.passes.base import PassRecord
from hecate.passes.dumps.folder import GraphLog, harmless
from hecate.passes.dumps.value_names import name_values, note_pass, short_names
from hecate.passes.fx import bodies_of
from hecate.passes.invariants import verify

log = logging.getLogger("hecate")


def run_passes(
    gm: GraphModule,
    context: PassContext,
    *,
    passes: Sequence[Pass] = PASSES,
    disabled: Collection[str] = (),
    dump: GraphLog | None = None,
    check: Callable[[GraphModule], None] = verify,
) -> list[PassRecord]:
    """Apply ``passes`` in order to ``gm`` and the bodies of its higher-order operators, in place.

    ``check`` is called after every pass. Raises InvalidGraphError if a pass broke an invariant.
    """
    layers = short_names(context.layer_names)
    with harmless("names of values"):
        for body in bodies_of(gm):
            name_values(body.graph, body.graph.nodes, layers)
    if dump:
        dump.begin(gm)
    records = []
    for index, function in enumerate(passes, start=1):
        name = function.__name__
        if name in disabled:
            record = PassRecord(name=name, enabled=False, seconds=0.0)
        else:
            before = {body: set(body.graph.nodes) for body in bodies_of(gm)}
            start = time.perf_counter()
            outcomes = []
            try:
                for body in bodies_of(gm):
                    outcomes.append(function(body, context))
                    check(body)
            except Exception:
                # The broken graph is dumped, since it shows what went wrong.
                if dump:
                    dump.broken(index, name, gm)
                raise
            record = PassRecord(
                name=name,
                enabled=True,
                rewritten=sum(outcome.rewritten for outcome in outcomes),
                skipped=tuple(skip for outcome in outcomes for skip in outcome.skipped),
                seconds=time.perf_counter() - start,
                remarks=tuple(remark for outcome in outcomes for remark in outcome.remarks),
            )
            # Names are for people only.
            with harmless("names of values"):
                for body, known in before.items():
                    name_values(body.graph, note_pass(body.graph.nodes, known, name), layers)
            log.info(
                "%02d %s: %d rewritten, %d skipped, %.0f ms",
                index,
                name,
                record.rewritten,
                len(record.skipped),
                record.seconds * 1e3,
            )
        records.append(record)
        if dump:
            dump.after(index, record, gm, summary_of(function))
    for body in bodies_of(gm):
        body.recompile()
    if dump:
        dump.end()
    return records
