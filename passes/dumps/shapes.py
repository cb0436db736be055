"""What is known of every value in a graph, as text: ``f32[R', 16]``.

Where a graph has fake values their sizes are shown. Passes on captured graphs insert nodes without one: their sizes
depend on the rank, or on who routes what. For these the letters of the glossary stand (``runtime/__init__.py``):
E experts, W ranks, K replicas that this rank holds, S slots, R rows that it sends, R' rows that it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from hecate.passes.dumps.value_names import operator_name
from hecate.passes.fx import is_getitem
from hecate.runtime.ops.ticket import TICKET_PARTS

LEGEND = "E experts, W ranks, K replicas here, S slots here, R rows sent, R' rows computed here"

# As torch's own printed graphs have them.
_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A tensor's dtype and sizes, as text."""

    dtype: str
    sizes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.sizes)}]"

    def with_rows(self, leading: str) -> Known:
        """The same with another dimension 0."""
        return Known(self.dtype, (leading, *self.sizes[1:]))


# A tensor, several results, a number, or nothing known. A string, because it names itself.
Value: TypeAlias = "Known | tuple[Value, ...] | str | None"


def values_of(graph: Graph) -> dict[Node, Value]:
    """What is known of each node's value, in graph order."""
    found: dict[Node, Value] = {}
    for node in graph.nodes:
        real = _of_meta(node)
        found[node] = real if real is not None else _infer(node, found)
    return found


def text_of(value: Value) -> str:
    """The value as an annotation, without quotes; "" if nothing is known."""
    if isinstance(value, tuple):
        parts = [text_of(part) or "?" for part in value]
        return f"({', '.join(parts[:4])}{', ...' if len(parts) > 4 else ''})"
    return str(value) if value is not None else ""


def known(value: Any) -> Value:
    """What a fake value shows."""
    if isinstance(value, torch.Tensor):
        return _tensor(str(value.dtype), tuple(map(str, value.shape)))
    if isinstance(value, (list, tuple)):
        return tuple(known(part) for part in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"Sym({value})"
    return type(value).__name__ if isinstance(value, (bool, int, float)) else None


def _of_meta(node: Node) -> Value:
    for key in ("val", "example_value"):
        if key in node.meta and node.meta[key] is not None:
            return known(node.meta[key])
    return None


def _infer(node: Node, found: Mapping[Node, Value]) -> Value:
    """Of what a pass inserted: from its operator, or from what it is a copy of."""
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    given = [_at(argument, found) for argument in node.args]
    if is_getitem(node):
        source, index = given[0], node.args[1]
        if isinstance(source, tuple) and isinstance(index, int) and index < len(source):
            return source[index]
        # A lookup by a tensor of indexes: as many rows as these.
        if isinstance(source, Known) and len(given) > 1 and isinstance(given[1], Known) and given[1].sizes:
            return source.with_rows(given[1].sizes[0])
    name = operator_name(node)
    if name:
        return _of_operator(name, node, given)
    if node.target is torch.ops.aten.sym_size.int:
        first, dim = given[0], node.args[1]
        return f"Sym({first.sizes[dim]})" if isinstance(first, Known) and isinstance(dim, int) else "Sym"
    if "hecate_was" in node.meta:
        leading = _first(given)
        return _was(node.meta["hecate_was"], leading.sizes[0] if leading is not None and leading.sizes else "")
    if any(isinstance(value, str) for value in given):
        return "Sym"
    # Sums, casts and whatever else keeps the shape.
    return _first(given)


def _was(noted: Any, leading: str) -> Value:
    """What a copy was (``forget_value``), with rows of others, or other experts; the rest of a row is what it was."""
    if isinstance(noted, list):
        return tuple(_was(part, leading) for part in noted)
    if noted is None:
        return None
    dtype, sizes = noted
    was = _tensor(dtype, sizes)
    return was.with_rows(leading) if leading and sizes else was


def _tensor(dtype: str, sizes: Sequence[str]) -> Known:
    plain = dtype.removeprefix("torch.")
    return Known(_SHORT.get(plain, plain), tuple(sizes))


def _of_operator(name: str, node: Node, given: Sequence[Value]) -> Value:
    first = _first(given)
    match name:
        case "place" | "calibrate":
            return (Known("i8", ("E", "W")), Known("i64", ("K",)))
        case "gather_counts":
            return Known("i64", ("W", "E"))
        case "gather_experts":
            return first.with_rows(str(node.args[1])) if first else None
        case "sparse_all_gather" | "top_up":
            shards = given[0] if isinstance(given[0], tuple) else ()
            return tuple(shard.with_rows("K") if isinstance(shard, Known) else None for shard in shards)
        case "hold":
            return tuple(given[2:])
        case "own_experts" | "count_rows" | "replicate":
            return first
        case "replicate_bucket":
            return given[0]
        case "route":
            rows, chunks = node.args[4:6]
            assert isinstance(chunks, int)
            splits = "3" if isinstance(rows, Node) else "2"
            one = (Known("i32", ("S",)), Known("i64", (splits, "W")), Known("i64", ("R",)), Known("i64", ("R'",)))
            assert len(one) == TICKET_PARTS
            return one * chunks
        case "route_nodes":
            return (Known("i64", ("4", "W")), Known("i64", ("u",)), Known("i64", ("m",)), Known("i64", ("R'",)))
        case "exchange" | "exchange_nodes":
            return first.with_rows("R'") if first else None
        case "exchange_back" | "exchange_nodes_back":
            return first.with_rows("R") if first else None
        case "row_slots":
            return Known("i64", ("R'",))
        case "sizes_to_offsets":
            return Known("i32", ("E",))
        case "grouped_mm" | "grouped_mm_pair":
            weight = given[1] if len(given) > 1 else None
            if first is not None and isinstance(weight, Known) and first.sizes and weight.sizes:
                return Known(first.dtype, (*first.sizes[:-1], weight.sizes[-1]))
            return None
        case _:
            return None


def _at(argument: Any, found: Mapping[Node, Value]) -> Value:
    if isinstance(argument, Node):
        return found.get(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(_at(part, found) for part in argument)
    return None


def _first(given: Sequence[Value]) -> Known | None:
    """The first tensor among arguments."""
    for value in given:
        if isinstance(value, Known):
            return value
        if isinstance(value, tuple) and (inner := _first(value)) is not None:
            return inner
    return None
