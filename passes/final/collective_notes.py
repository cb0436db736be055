"""Notes of collectives: what each is, for whom, and what was predicted for it, as text in the graph.

They are text, because a graph that comes from a cache brings nothing else along.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from torch.fx import Node

from hecate.passes.base import PassContext
from hecate.passes.fx import arguments_of
from hecate.runtime.comm.collective import Carries, collective_of, start_of
from hecate.runtime.comm.queue import Span
from hecate.runtime.ops.dense import DENSE_SHARDS
from hecate.runtime.ops.gradients import REPLICATED


def write_note(
    node: Node, context: PassContext, predicted: float = 0.0, behind: float = 0.0, sent: float = 0.0
) -> str:
    """Return the note of a collective or its start; ``predicted`` and ``behind`` in seconds, ``sent`` in bytes."""
    collective = collective_of(node.target)
    if collective is None:
        raise LookupError(f"hecate: {node.name} is no collective")
    subject = _subject_of(node, collective.carries, context)
    return f"{context.part} {collective.name} {predicted:.9f} {behind:.9f} {sent:.0f} {subject}"


def _subject_of(node: Node, carries: Carries, context: PassContext) -> str:
    arguments = arguments_of(node)
    match carries:
        case "rows" | "counts" | "tickets" | "replicas" | "experts":
            return context.name(arguments["layer"])
        case "dense":
            return f"{DENSE_SHARDS[arguments['ids'][0]].name} and {len(arguments['ids']) - 1} more"
        case "bucket":
            first, count = REPLICATED[arguments["ids"][0]], len(arguments["ids"])
            if first.layer is not None:
                return f"{context.name(first.layer)}, over groups"
            whole = first.sync.world is first.sync.world.everyone
            return f"{count} dense parameters" if whole else f"{count} shards, over groups"
        case "fractions":
            return "balance loss"
        case _:
            assert_never(carries)


def schedule_lines(spans: Iterable[Span]) -> list[str]:
    """Return a line for each layer and part of the graph, with milliseconds: collectives, behind how much compute."""
    lines: dict[tuple[str, str], list[str]] = {}
    for span in spans:
        text = f"{span.operator} {_ms(span.predicted)} behind {_ms(span.behind)}"
        lines.setdefault((span.part, span.subject), []).append(text)
    return [f"{part} {subject}: {'; '.join(texts)}" for (part, subject), texts in lines.items()]


def _ms(seconds: float) -> str:
    """Return milliseconds with two places, and more where these would say nothing."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2f}" if milliseconds == 0 or milliseconds >= 0.1 else f"{milliseconds:.2g}"


def notes_in(nodes: Iterable[Node]) -> list[Span]:
    """Return the notes of all starts in a graph, as spans that have not run."""
    return [
        Span.of(arguments_of(node)["note"])
        for node in nodes
        if node.op == "call_function" and start_of(node.target) is not None
    ]
