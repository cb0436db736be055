"""Names of values, and the passes that wrote them: ``placement_L0``, ``send_index_L0``, ``rows_L0``.

FX names a value after the operator that makes it, so most inserted nodes would be ``getitem_77``. Here a value
is named as its operator was registered (``hecate.runtime.ops.registration``), with the number of its MoE layer: L0 is
the first one of the model. Values that depend on a tangent are gradients, ``grad_rows_L0``. Names are for people
only; no pass looks at them.

A node's writer is in two entries of ``meta["custom"]``, which autograd hands on to the nodes that it makes of it:

- ``hecate_pass``: name of the pass that inserted it.
- ``hecate_in``: id of the layer that it is for, where no argument says so (``Builder``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from hecate.passes.analysis.torch_values import name_in_model
from hecate.passes.fx import BODY_OF, between, closure_forward, computed_from, is_getitem, note
from hecate.private import OpOverload, OpOverloadPacket, PlainAOTInput, names_in, rename, schema_of
from hecate.runtime.comm.collective import collective_of, start_of
from hecate.runtime.ops.experts import hold
from hecate.runtime.ops.registration import RESULTS, Results


def _called_by(node: Node) -> Any:
    """Return the operator or function that a node calls, of a half of a collective the whole; None for no call."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if (collective := collective_of(target)) is not None:
        return collective.whole
    return target.default if isinstance(target, OpOverloadPacket) and "default" in target.overloads() else target


def results_of(node: Node) -> Results | None:
    """Return the names that a node's operator has for its results; None for all that is not Hecate's."""
    return RESULTS.get(_called_by(node))


def operator_name(node: Node) -> str:
    """Return the name of Hecate's operator or function in a node; for a half of a collective the whole's; or ""."""
    called = _called_by(node)
    if isinstance(called, OpOverload):
        space, _, name = schema_of(called).name.partition("::")
        return name if space == "hecate" else ""
    return str(getattr(called, "__name__", "")) if called in RESULTS else ""


def layer_of(node: Node) -> int | None:
    """Return the id of the MoE layer that a node is for, by its arguments or its note; None if neither says it."""
    if is_getitem(node) and isinstance(node.args[0], Node) and operator_name(node.args[0]):
        return layer_of(node.args[0])
    if node.target is hold:
        return _number(node.args[0])
    target = node.target if isinstance(node.target, OpOverload) else _called_by(node)
    if operator_name(node) and isinstance(target, OpOverload):
        names = [argument.name for argument in schema_of(target).arguments]
        if "layer" in names and names.index("layer") < len(node.args):
            return _number(node.args[names.index("layer")])
    return _number(node.meta.get("custom", {}).get("hecate_in", node.meta.get(BODY_OF)))


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def note_pass(nodes: Iterable[Node], before: Collection[Node], name: str) -> list[Node]:
    """Note on every node that was not there before which pass inserted it, and return these nodes."""
    new = [node for node in nodes if node not in before]
    for node in new:
        note(node, "hecate_pass", name)
    return new


def pass_of(node: Node) -> str:
    """Return the pass that inserted a node, or the node from which autograd made it; "" if none did."""
    return str(node.meta.get("custom", {}).get("hecate_pass", ""))


def short_names(layers: Iterable[int]) -> dict[int, str]:
    """Return ``L0``, ``L1``, ... for the ids of a model's layers, in their order."""
    return {layer: f"L{number}" for number, layer in enumerate(layers)}


def name_values(graph: Graph, nodes: Iterable[Node], layers: Mapping[int, str]) -> None:
    """Rename results of Hecate's operators and arguments of captured graphs by their values.

    A value that has its name keeps it from pass to pass. ``layers`` has the short name of each layer id.
    """
    wanted = {node: found for node in nodes if (found := _name_of(node, layers))}
    if not wanted:
        return
    tangents = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")]
    gradients = closure_forward(tangents) if tangents else set()
    alive = {node.name for node in graph.nodes}
    used = names_in(graph)
    for node, (name, suffix) in wanted.items():
        # Some values are gradients by their own name.
        own = "grad" in name or name.startswith(("sparse_reduce_scatter", "reduce_scatter"))
        prefix = "grad_" if node in gradients and not own else ""
        full = f"{prefix}{name}{suffix}"
        if re.fullmatch(rf"{full}(_\d+)?", node.name):
            continue
        if full not in alive:
            # The name is of an erased node: a wait takes the name of the collective that it is a half of.
            used.discard(full)
        alive.discard(node.name)
        rename(node, full)
        alive.add(node.name)


def _name_of(node: Node, layers: Mapping[int, str]) -> tuple[str, str] | None:
    """Return the name of a value, and the layer's suffix; None if it keeps its name."""
    if node.op == "placeholder":
        # Dynamo calls tensors l_self_modules_...; a size has the short name that shapes have it by.
        given = _as_name(source_of(node)).removeprefix("L_") if node.name.startswith("l_") else ""
        return (given, "") if given.isidentifier() else None
    if is_getitem(node):
        source, index = node.args[0], node.args[1]
        results = results_of(source) if isinstance(source, Node) else None
        # A function that gives one result has no parts: this is a part of that tensor.
        if results is None or not results.whole or not isinstance(source, Node) or not isinstance(index, int):
            return None
        return _part(source, results, index), _suffix(source, layers)
    name = operator_name(node)
    if name and start_of(node.target) is not None:
        return f"{name}_started", _suffix(node, layers)
    results = results_of(node)
    if results is None:
        return None
    return results.whole or results.names[0] + _parameter(node, results, 0), _suffix(node, layers)


def _part(source: Node, results: Results, index: int) -> str:
    """Return the name of one result of an operator with several."""
    names = results.names
    if source.target is hold:
        # Layer and placement come first; then own experts, and as many replicas.
        return names[0] if index < (len(source.args) - 2) // 2 else names[1]
    if len(names) == 1:
        return names[0] + _parameter(source, results, index)
    # A number marks the tickets from the second chunk on.
    chunk = index // len(names)
    return names[index % len(names)] + (f"_part{chunk}" if chunk else "")


def _parameter(node: Node, results: Results, index: int) -> str:
    """Return the name of a result's dense parameter, ``_layers_0_norm_weight``; "" if it has none or is unknown."""
    lists: list[Any] = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in node.args]
    # Ids are the only list of numbers.
    ids: list[Any] = next((ids for ids in lists if ids and all(_number(id) is not None for id in ids)), [])
    if results.records is None or index >= len(ids):
        return ""
    try:
        return "_" + _as_name(results.records[ids[index]].name)
    except LookupError:
        return ""


def _as_name(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")


def _suffix(node: Node, layers: Mapping[int, str]) -> str:
    layer = layer_of(node)
    return f"_{layers.get(layer, f'L_{layer}')}" if layer is not None else ""


# --- arguments: Dynamo knows their sources for its graph, and later graphs learn them here ---


def source_of(node: Node) -> str:
    """Return the name in the model of a graph's argument, ``layers.0.norm.weight``; "" if it is not known."""
    if "hecate_source" in node.meta:
        return str(node.meta["hecate_source"])
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", str(source.name))
    return name_in_model(name)


def note_sources(gm: GraphModule, sources: Sequence[str]) -> None:
    """Note on the arguments of a graph after autograd which arguments of the captured graph they are."""
    for node in gm.graph.find_nodes(op="placeholder"):
        described = node.meta.get("desc")
        if isinstance(described, PlainAOTInput) and described.idx < len(sources):
            node.meta["hecate_source"] = sources[described.idx]


# --- regions: which nodes compute with the experts of which layer, to colour them ---

_PRODUCTS = ("grouped_mm", "grouped_mm_pair", "grouped_mm_weight_grad", "grouped_mm_pair_weight_grad")


def expert_regions(graph: Graph, *, joint: bool = False) -> dict[Node, int]:
    """Return the layer id of every node of MoE layers' experts: results of Hecate's operators, and nodes between."""
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
