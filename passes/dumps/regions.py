"""Regions of experts: which nodes of a graph compute with the experts of which layer, to colour them."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from hecate.passes.dumps.value_names import layer_of, operator_name, results_of
from hecate.passes.fx import between, computed_from, is_getitem
from hecate.runtime.comm.collective import collective_of

_PRODUCTS = ("grouped_mm", "grouped_mm_pair", "grouped_mm_weight_grad", "grouped_mm_pair_weight_grad")


def expert_regions(graph: Graph, *, joint: bool = False) -> dict[Node, int]:
    """Return the layer id of every node of an MoE layer's experts: results of Hecate's operators, and nodes between.

    Args:
        joint: forward and backward are in one graph, where nearly everything lies between two nodes of a layer.
    """
    found = _named(graph)
    if joint:
        return found
    anchors: dict[int, list[Node]] = {}
    for node, layer in found.items():
        collective = collective_of(node.target) if node.op == "call_function" else None
        carries_rows = collective is not None and collective.carries == "rows"
        if operator_name(node) in _PRODUCTS or carries_rows:
            anchors.setdefault(layer, []).append(node)
    for layer, ends in anchors.items():
        for node in between(ends, ends):
            found.setdefault(node, layer)
    return found


def _named(graph: Graph) -> dict[Node, int]:
    """Return nodes that say their layer, and results and products of these."""
    found: dict[Node, int] = {}
    for node in graph.nodes:
        layer = layer_of(node)
        name = operator_name(node)
        results = results_of(node)
        dense = results is not None and results.records is not None
        if layer is None and node.op == "call_function" and not dense and (name or is_getitem(node)):
            # A product has the layer of its weights; a part, that of the whole.
            sources = node.all_input_nodes if name else node.all_input_nodes[:1]
            layer = next((found[source] for source in reversed(sources) if source in found), None)
        if layer is None:
            continue
        found[node] = layer
        if name == "gather_experts":
            # Views and casts of the experts alone come before the products that use them.
            for view in computed_from([node]):
                found.setdefault(view, layer)
    return found


def layers_in(regions: Mapping[Node, int]) -> list[int]:
    """Return the layers in the order in which they first come."""
    return list(dict.fromkeys(regions.values()))
