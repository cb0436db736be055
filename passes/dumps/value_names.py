"""Names of values, and who wrote them: ``placement_L0``, ``send_index_L0``, ``rows_L0``.

FX names a value after the operator that makes it, so most of what passes insert would be ``getitem_77``. Here a value
is named after what it is, with the number of its MoE layer: L0 is the first one of the model. What depends on a
tangent is a gradient, ``grad_rows_L0``. Names are for people only; no pass looks at them.

A node knows who wrote it by two entries of ``meta["custom"]``, which autograd hands on to what it makes of the node:

- ``hecate_pass``: name of the pass that inserted it.
- ``hecate_in``: id of the layer that it is for, where no argument says so (``Builder``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from hecate.passes.dumps.sources import source_of
from hecate.passes.fx import BODY_OF, closure_forward, is_getitem, note
from hecate.runtime.comm.collective import collective_of, start_of
from hecate.runtime.ops.dense import DENSE_SHARDS
from hecate.runtime.ops.gradients import REPLICATED
from hecate.runtime.ops.node_ticket import NODE_TICKET_PARTS
from hecate.runtime.ops.ticket import TICKET_PARTS
from hecate.runtime.state.registry import Registry

# The results of an operator; an operator with one name and a list of results has one of them for each parameter.
_RESULTS: dict[str, tuple[str, ...]] = {
    "gather_experts": ("experts",),
    "own_experts": ("own",),
    "place": ("placement", "slots"),
    "calibrate": ("placement", "slots"),
    "sparse_all_gather": ("replica",),
    "top_up": ("replica",),
    "gather_counts": ("counts",),
    "count_rows": ("offsets",),
    "sizes_to_offsets": ("offsets",),
    "row_slots": ("row_slots",),
    "route": ("offsets", "splits", "send_index", "receive_index"),
    "route_nodes": ("node_splits", "node_send_index", "node_middle_index", "node_receive_index"),
    "exchange": ("rows",),
    "exchange_nodes": ("rows",),
    "exchange_back": ("results",),
    "exchange_nodes_back": ("results",),
    "grouped_mm": ("product",),
    "grouped_mm_pair": ("product",),
    "grouped_mm_weight_grad": ("weight_grad",),
    "grouped_mm_pair_weight_grad": ("own_weight_grad", "replica_weight_grad"),
    "sparse_reduce_scatter": ("own_grad",),
    "reduce_scatter_experts": ("own_grad",),
    "reduce_scatter_dense": ("shard_grad",),
    "average_gradients": ("mean_grad",),
    "gather_dense": ("whole",),
    "replicate": ("whole",),
    "replicate_bucket": ("whole",),
}  # fmt: skip
# What a result is called before it is taken apart.
_TUPLES = {
    "place": "placed", "calibrate": "calibrated", "route": "ticket",
    "route_nodes": "node_ticket", "hold": "held",
    "sparse_all_gather": "replicas", "top_up": "replicas", "gather_dense": "wholes",
    "replicate_bucket": "wholes", "average_gradients": "mean_grads", "reduce_scatter_dense": "shard_grads",
    "sparse_reduce_scatter": "own_grads", "grouped_mm_pair_weight_grad": "weight_grads",
}  # fmt: skip
assert len(_RESULTS["route"]) == TICKET_PARTS and len(_RESULTS["route_nodes"]) == NODE_TICKET_PARTS
# Results, and collectives on their way, that are gradients by their own name; the name goes on after these words.
_GRADIENTS = (
    "weight_grad", "own_weight_grad", "replica_weight_grad", "own_grad", "shard_grad", "mean_grad",
    "sparse_reduce_scatter_started", "reduce_scatter", "average_gradients_started",
)  # fmt: skip
_FUNCTIONS = ("hold", "own_experts", "replicate", "replicate_bucket")
# Operators on dense parameters: where the record is that knows the name of each.
OF_DENSE: dict[str, Registry[Any]] = {
    "gather_dense": DENSE_SHARDS, "reduce_scatter_dense": DENSE_SHARDS,
    "replicate": REPLICATED, "replicate_bucket": REPLICATED, "average_gradients": REPLICATED,
}  # fmt: skip


def operator_name(node: Node) -> str:
    """The name of Hecate's operator or function that a node calls; of a half of a collective, the whole; else ""."""
    if node.op != "call_function":
        return ""
    collective = collective_of(node.target)
    if collective is not None:
        return collective.name
    if isinstance(node.target, torch._ops.OpOverload):
        space, _, name = node.target._schema.name.partition("::")
        return name if space == "hecate" else ""
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        space, _, name = node.target._qualified_op_name.partition("::")
        return name if space == "hecate" else ""
    function = node.target
    if not str(getattr(function, "__module__", "")).startswith("hecate.runtime.ops"):
        return ""
    name = str(getattr(function, "__name__", ""))
    return name if name in _FUNCTIONS else ""


def layer_of(node: Node) -> int | None:
    """The id of the MoE layer that a node is for, as its arguments or who wrote it say; None if neither does."""
    if node.op != "call_function":
        return _noted(node)
    if is_getitem(node):
        source = node.args[0]
        return layer_of(source) if isinstance(source, Node) and operator_name(source) else _noted(node)
    name = operator_name(node)
    if name == "hold":
        return _number(node.args[0])
    target = node.target.default if isinstance(node.target, torch._ops.OpOverloadPacket) and name else node.target
    if name and isinstance(target, torch._ops.OpOverload):
        names = [argument.name for argument in target._schema.arguments]
        if "layer" in names and names.index("layer") < len(node.args):
            return _number(node.args[names.index("layer")])
    return _noted(node)


def _noted(node: Node) -> int | None:
    found = node.meta.get("custom", {}).get("hecate_in", node.meta.get(BODY_OF))
    return found if isinstance(found, int) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def note_pass(nodes: Iterable[Node], before: Collection[Node], name: str) -> list[Node]:
    """Write on every node that was not there before which pass inserted it; these nodes."""
    new = [node for node in nodes if node not in before]
    for node in new:
        note(node, "hecate_pass", name)
    return new


def pass_of(node: Node) -> str:
    """The pass that inserted it, or what autograd made it of; "" if none did."""
    return str(node.meta.get("custom", {}).get("hecate_pass", ""))


def short_names(layers: Iterable[int]) -> dict[int, str]:
    """``L0``, ``L1``, ... for the ids of a model's layers, in their order."""
    return {layer: f"L{number}" for number, layer in enumerate(layers)}


def name_values(graph: Graph, nodes: Iterable[Node], layers: Mapping[int, str]) -> None:
    """Rename ``nodes`` of ``graph`` after what their values are.

    Only what Hecate's operators make, and the arguments of captured graphs; and nothing that has its name already, so
    that a value keeps its name from pass to pass.

    Args:
        layers: short name of each layer id (:func:`short_names`).
    """
    wanted = {node: found for node in nodes if (found := _name_of(node, layers))}
    if not wanted:
        return
    tangents = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")]
    gradients = closure_forward(tangents) if tangents else set()
    alive = {node.name for node in graph.nodes}
    used = graph._graph_namespace._used_names
    for node, (name, suffix) in wanted.items():
        prefix = "grad_" if node in gradients and not name.startswith(_GRADIENTS) else ""
        full = f"{prefix}{name}{suffix}"
        if re.fullmatch(rf"{full}(_\d+)?", node.name):
            continue
        if full not in alive:
            # Of a node that was erased: a wait takes the name of the collective that it is a half of.
            used.discard(full)
        alive.discard(node.name)
        node._rename(full)
        alive.add(node.name)


def _name_of(node: Node, layers: Mapping[int, str]) -> tuple[str, str] | None:
    """What a value is, and the layer's suffix; None if it keeps its name."""
    if node.op == "placeholder":
        # Dynamo calls tensors l_self_modules_...; a size has the short name that shapes have it by.
        given = _as_name(source_of(node)).removeprefix("L_") if node.name.startswith("l_") else ""
        return (given, "") if given.isidentifier() else None
    if is_getitem(node):
        source, index = node.args[0], node.args[1]
        if not isinstance(source, Node) or not isinstance(index, int):
            return None
        name = _part(source, operator_name(source), index)
        return (name, _suffix(source, layers)) if name else None
    name = operator_name(node)
    if not name:
        return None
    if start_of(node.target) is not None:
        return f"{name}_started", _suffix(node, layers)
    if name in _TUPLES:
        return _TUPLES[name], _suffix(node, layers)
    results = _RESULTS.get(name)
    if not results:
        return None
    return results[0] + _parameter(node, name, 0), _suffix(node, layers)


def _part(source: Node, operator: str, index: int) -> str:
    """The name of one result of an operator with several."""
    if operator == "hold":
        # Layer and placement come first; then own experts, and as many replicas.
        own = (len(source.args) - 2) // 2
        return "own" if index < own else "replica"
    results = _RESULTS.get(operator)
    # The functions that give one result have no parts: this is a part of that tensor.
    if not results or operator in ("own_experts", "replicate"):
        return ""
    if operator in OF_DENSE:
        return results[0] + _parameter(source, operator, index)
    name = results[index % len(results)]
    # The second chunk's ticket and those behind it.
    chunk = index // len(results) if operator == "route" else 0
    return f"{name}_part{chunk}" if chunk else name


def _parameter(node: Node, operator: str, index: int) -> str:
    """``_layers_0_norm_weight``, the dense parameter that a result is of; "" of all else, and where nobody knows."""
    records = OF_DENSE.get(operator)
    lists: list[Any] = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in node.args]
    # The only list of numbers.
    ids: list[Any] = next((ids for ids in lists if ids and all(_number(id) is not None for id in ids)), [])
    if records is None or index >= len(ids):
        return ""
    try:
        return "_" + _as_name(records[ids[index]].name)
    except LookupError:
        return ""


def _as_name(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")


def _suffix(node: Node, layers: Mapping[int, str]) -> str:
    layer = layer_of(node)
    return f"_{layers.get(layer, f'L_{layer}')}" if layer is not None else ""
