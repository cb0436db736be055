"""Questions about Dynamo's graph: torch functions, fake values in ``meta["example_value"]``, in-place operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from hecate.passes.base import Refused
from hecate.passes.fx import arg, calls, describe
from hecate.passes.match import name_of
from hecate.private import enter_autocast, is_erased, memory_of, set_grad_enabled

# Advice for reasons that several passes have.
PLAIN_FORM = (
    "write the plain form: y = y + b in place of y += b, out.index_add_(0, rows, y) in place of out[rows] += y"
)
ONE_GRAD_MODE = "compute all of the experts with gradients on, or all of it with gradients off"


def value_of(node: Any) -> Any:
    """Return the fake value that Dynamo recorded for a node, or None."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def shape_of(node: Any) -> tuple[Any, ...]:
    """Return the sizes of a node's tensor; none where nothing is known."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def gathers_by_layer(graph: Graph) -> dict[int, list[Node]]:
    """Return the ``gather_experts`` nodes of each layer id, in graph order."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if calls(node, torch.ops.hecate.gather_experts):
            found.setdefault(int(arg(node, 2)), []).append(node)
    return found


def mutates(node: Node) -> Node | None:
    """Return the node whose tensor this one changes in place, as the graph has it (``add_``, ``+=``, ``out=``)."""
    out = node.kwargs.get("out")
    if isinstance(out, Node):
        return out
    if getattr(node.target, "__module__", "") == "_operator":
        # operator.and_ and or_ have the underscore of a keyword.
        changes = name_of(node) in _INPLACE
    else:
        changes = name_of(node).endswith("_") and not name_of(node).endswith("__")
    if calls(node, F.embedding, F.embedding_bag):
        # With a max_norm they scale the lines down that they read.
        given = dict(zip(("input", "weight", "", "max_norm"), node.args, strict=False)) | node.kwargs
        weight = given.get("weight")
        return weight if isinstance(weight, Node) and given.get("max_norm") is not None else None
    first = node.args[0] if node.args else None
    return first if isinstance(first, Node) and (changes or node.kwargs.get("inplace") is True) else None


_INPLACE = [
    "setitem",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "iand",
    "ior",
    "ixor",
    "ipow",
    "imod",
    "imatmul",
    "ilshift",
    "irshift",
]


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size, or its number in the first batch."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def storage_of(node: Any) -> int | None:
    """Return the identity of the memory of a node's tensor, which views share; None where nothing is known."""
    value = value_of(node)
    return memory_of(value) if isinstance(value, torch.Tensor) else None


# Advice where autocast is in the way.
NO_AUTOCAST = "Config(mixed_precision=...) in place of autocast"


def under_autocast(graph: Graph) -> bool:
    """Tell whether the model, or a part of it, runs under autocast; a grouped matmul does not know it."""
    enters = [node for node in graph.nodes if calls(node, enter_autocast)]
    # Models also switch it off, around a gate.
    inside = any(arg(node, 2) is not False for node in enters)
    return inside or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def is_parameter(node: Node) -> bool:
    """Tell whether a node is a parameter of the model, as the graph is given it."""
    return node.op == "placeholder" and (
        _comes_from(node, "_parameters[") or isinstance(value_of(node), torch.nn.Parameter)
    )


def is_state(node: Node) -> bool:
    """Tell whether a node is a parameter or buffer of the model, as the graph is given it."""
    return is_parameter(node) or (node.op == "placeholder" and _comes_from(node, "_buffers["))


def _comes_from(placeholder: Node, kind: str) -> bool:
    source = getattr(placeholder, "_dynamo_source", None)
    return source is not None and kind in source.name


class GraphFacts:
    """Facts about a whole graph that passes ask for, each found once.

    They hold as long as no pass adds in-place operations or changes of the grad mode.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def grad_modes(self) -> dict[Node, bool]:
        """Modes of nodes: whether gradients are recorded at each."""
        modes: dict[Node, bool] = {}
        enabled = True
        for node in self.graph.nodes:
            modes[node] = enabled
            if calls(node, set_grad_enabled):
                enabled = bool(arg(node, 0))
        return modes

    @cached_property
    def changes(self) -> list[tuple[Node, int | None]]:
        """Every in-place operation, and the storage that it changes."""
        found = ((node, mutates(node)) for node in self.graph.nodes)
        return [(node, storage_of(target)) for node, target in found if target is not None]

    def grad_mode(self, node: Node) -> bool:
        """Tell whether gradients are recorded at a node, which may have been added since."""
        while node not in self.grad_modes:
            node = node.prev
        return self.grad_modes[node]

    def refuse_mixed_modes(self, nodes: Iterable[Node], where: str) -> None:
        """Raise Refused unless gradients are recorded at all of ``nodes``, or at none."""
        if len({self.grad_mode(node) for node in nodes}) != 1:
            raise Refused(f"gradients are switched on and off {where}", fix=ONE_GRAD_MODE)

    def refuse_autocast(self) -> None:
        """Raise Refused if the model, or a part of it, runs under autocast."""
        if under_autocast(self.graph):
            raise Refused("it runs under autocast, which a grouped matmul does not know", fix=NO_AUTOCAST)

    @cached_property
    def _of_state(self) -> set[Node]:
        """Nodes that are computed from the model's own state alone."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            own = is_state(node) if node.op == "placeholder" else all(n in found for n in node.all_input_nodes)
            if own:
                found.add(node)
        return found

    def same_on_all_ranks(self, node: Node) -> bool:
        """Tell whether a value is computed from parameters, buffers and constants alone, not from own tokens.

        Nodes that were added since do not count: rows that a pass exchanges are other ones on every rank.
        """
        return node in self._of_state

    def refuse_changes_of(self, values: Iterable[Node], *, until: Node) -> None:
        """Raise Refused if one of ``values`` is changed in place, itself or through a view, before ``until``.

        An in-place operation is no edge of the graph: a pass that moves or replaces the value would miss the change.
        """
        made: dict[int, Node] = {}
        for value in values:
            storage = storage_of(value)
            if storage is not None:
                made[storage] = min(value, made.get(storage, value))
        for node, storage in self.changes:
            if is_erased(node) or node > until:
                continue
            if storage is None or (storage in made and node > made[storage]):
                raise Refused(f"in-place {describe(node)}", node, fix=PLAIN_FORM)


# Dynamo's name of the model that it captures. With a decorator around its forward that is the first of ``*args``
# (transformers from 5.24).
_MODEL = re.compile(r"L\['(?:self'\]|args'\]\[0\](?=\.|$))")


def is_of_model(source: str) -> bool:
    """Tell whether a source is the model or something that it has.

    >>> is_of_model("L['args'][0].layers.0"), is_of_model("L['args'][0]['ids']"), is_of_model("L['ids']")
    (True, False, False)
    """
    return _MODEL.match(source) is not None


def name_in_model(source: str) -> str:
    """Return a source without the model in front.

    >>> name_in_model("L['self'].layers.0.norm"), name_in_model("L['args'][0].layers.0"), name_in_model("L['self']")
    ('layers.0.norm', 'layers.0', '(the model)')
    """
    return _MODEL.sub("(the model)", source, count=1).removeprefix("(the model).")
