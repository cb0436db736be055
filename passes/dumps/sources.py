"""Sources of a graph's arguments in the model: Dynamo knows them for its graph, and later graphs learn them here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from hecate.passes.fx import name_in_model
from hecate.private import PlainAOTInput


def source_of(node: Node) -> str:
    """Return the name in the model of a graph's argument, ``layers.0.norm.weight``; "" if it is not known."""
    if "hecate_source" in node.meta:
        return str(node.meta["hecate_source"])
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", str(source.name))
    return name_in_model(name)


def sources_of(gm: GraphModule) -> list[str]:
    """Return :func:`source_of` for each argument of a captured graph."""
    return [source_of(node) for node in gm.graph.find_nodes(op="placeholder")]


def note_sources(gm: GraphModule, sources: Sequence[str]) -> None:
    """Note on the arguments of a graph after autograd which arguments of the captured graph they are."""
    for node in gm.graph.find_nodes(op="placeholder"):
        described = node.meta.get("desc")
        if isinstance(described, PlainAOTInput) and described.idx < len(sources):
            node.meta["hecate_source"] = sources[described.idx]
