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
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch.fx import Graph, Node

from hecate.passes.dumps.sources import source_of
from hecate.passes.fx import BODY_OF, closure_forward, is_getitem, note
from hecate.private import OpOverload, OpOverloadPacket, names_in, qualified_name, rename, schema_of
from hecate.runtime.comm.collective import collective_of, start_of
from hecate.runtime.ops.experts import hold
from hecate.runtime.ops.registration import RESULTS, Results


def results_of(node: Node) -> Results | None:
    """Return the names that a node's operator has for its results; None for all that is not Hecate's."""
    target: Any = node.target
    collective = collective_of(target)
    if collective is not None:
        target = collective.whole
    elif isinstance(target, OpOverloadPacket) and "default" in target.overloads():
        target = target.default
    return RESULTS.get(target) if node.op == "call_function" else None


def operator_name(node: Node) -> str:
    """Return the name of Hecate's operator or function in a node; for a half of a collective the whole's; or ""."""
    if node.op != "call_function":
        return ""
    collective = collective_of(node.target)
    if collective is not None:
        return collective.name
    if isinstance(node.target, OpOverload):
        space, _, name = schema_of(node.target).name.partition("::")
    elif isinstance(node.target, OpOverloadPacket):
        space, _, name = qualified_name(node.target).partition("::")
    else:
        return str(getattr(node.target, "__name__", "")) if node.target in RESULTS else ""
    return name if space == "hecate" else ""


def layer_of(node: Node) -> int | None:
    """Return the id of the MoE layer that a node is for, by its arguments or its note; None if neither says it."""
    if node.op != "call_function":
        return _noted(node)
    if is_getitem(node):
        source = node.args[0]
        return layer_of(source) if isinstance(source, Node) and operator_name(source) else _noted(node)
    name = operator_name(node)
    if node.target is hold:
        return _number(node.args[0])
    target = node.target.default if isinstance(node.target, OpOverloadPacket) and name else node.target
    if name and isinstance(target, OpOverload):
        names = [argument.name for argument in schema_of(target).arguments]
        if "layer" in names and names.index("layer") < len(node.args):
            return _number(node.args[names.index("layer")])
    return _noted(node)


def _noted(node: Node) -> int | None:
    found = node.meta.get("custom", {}).get("hecate_in", node.meta.get(BODY_OF))
    return found if isinstance(found, int) else None


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
    """Rename ``nodes`` of ``graph`` by their values.

    Only results of Hecate's operators and arguments of captured graphs are renamed, and nothing that has its name
    already, so that a value keeps its name from pass to pass.

    Args:
        layers: short name of each layer id (:func:`short_names`).
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
