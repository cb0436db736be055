"""What a collective is called in explanations and timelines, and what was predicted for it.

A label is text in the graph, because a graph that comes from a cache brings nothing else along: part of the graph,
operator, predicted seconds, seconds of compute meanwhile, and the layer or what it carries, with spaces between.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from hecate.passes.base import PassContext
from hecate.passes.fx import arguments_of, operator_name
from hecate.runtime.comm.queue import Span
from hecate.runtime.ops.dense import get_dense_shard
from hecate.runtime.ops.registration import STARTS


def label(node: Node, context: PassContext, predicted: float = 0.0, behind: float = 0.0) -> str:
    """The label of a collective, whole or its start."""
    operator, arguments = operator_name(node).removesuffix("_start"), arguments_of(node)
    if "layer" in arguments:
        subject = context.name(arguments["layer"])
    elif "ids" in arguments:
        subject = f"{get_dense_shard(arguments['ids'][0]).name} and {len(arguments['ids']) - 1} more"
    else:
        subject = f"{len(arguments['replicas'])} dense parameters"
    return f"{context.part} {operator} {predicted:.6f} {behind:.6f} {subject}"


def describe(spans: Iterable[Span], *, measured: bool) -> list[str]:
    """A line for each layer in each part of the graph, with milliseconds: what travels, behind how much compute.

    Args:
        measured: say too how long it took, and how long the compute stood still for it.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for span in spans:
        text = f"{span.operator} {span.predicted * 1e3:.2f} behind {span.behind * 1e3:.2f}"
        if measured and span.ready:
            text += f" (took {span.seconds * 1e3:.2f}, exposed {span.exposed * 1e3:.2f})"
        lines.setdefault((span.part, span.subject), []).append(text)
    return [f"{part} {subject}: {'; '.join(texts)}" for (part, subject), texts in lines.items()]


def starts_of(nodes: Iterable[Node]) -> list[Span]:
    """The labelled collectives of a graph, as spans that have not run."""
    return [
        Span.of(arguments_of(node)["note"]) for node in nodes if node.op == "call_function" and node.target in STARTS
    ]
