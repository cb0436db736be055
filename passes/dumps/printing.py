"""A graph as readable Python: one line a node, with dtype, sizes and the pass that wrote it.

    # model.py:41 in forward: hidden = tokens @ self.w_in[expert]
    rows_L0: "f32[R', 16]" = torch.ops.hecate.exchange.default(hidden, splits_L0, ...)  # exchange_rows, L0

The lines that passes inserted name the pass and the layer; all others follow the line of model code that they come
from. It is for reading and for comparing two graphs line by line, and parses as Python; it is not meant to be run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from hecate.passes.dumps.value_names import expert_regions, pass_of, results_of, source_of
from hecate.passes.fx import is_getitem, line_of
from hecate.private import HigherOrderOperator, OpOverload, OpOverloadPacket, dtype_abbrs
from hecate.runtime.comm.collective import collective_of

# Letters of the glossary (docs/glossary.md).
LEGEND = "K replicas here, S slots here, R rows sent, R' rows computed here; u0, s0, ... other sizes that vary"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a printed graph, with its experts' layer and what a collective carries ("" for neither)."""

    text: str
    layer: str = ""
    carries: str = ""


def print_graph(
    gm: GraphModule, layers: Mapping[int, str], names: Mapping[int, str], *, part: str = ""
) -> list[Line]:
    """Print ``gm`` and the bodies of its higher-order operators."""
    lines = [Line(text=f"# {LEGEND}")]
    lines += [Line(text=f"# {short}: {names.get(id, id)}", layer=short) for id, short in layers.items()]
    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            function = re.sub(r"\W", "_", name) or part or "forward"
            lines += [Line(text=""), *_function(function, module, layers, joint=part == "joint")]
    return lines


def text_of_lines(lines: Sequence[Line]) -> str:
    """Return the lines as the text of a file."""
    return "\n".join(line.text for line in lines) + "\n"


def _function(name: str, gm: GraphModule, layers: Mapping[int, str], *, joint: bool) -> Iterator[Line]:
    letters = letters_of(gm.graph)
    regions = expert_regions(gm.graph, joint=joint)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    yield Line(text=f"def {name}(")
    yield Line(text="    self,")
    for node in placeholders:
        yield Line(text=f"    {node.name}{_annotation(node, letters)},{_remark(source_of(node))}")
    yield Line(text="):")
    before = ""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        layer = layers.get(regions[node], f"L_{regions[node]}") if node in regions else ""
        line = line_of(node)
        where = f"{line.short} in {line.function}: {line.code}" if line is not None else ""
        if where and where != before and node.op != "output":
            before = where
            yield Line(text=f"    # {where}", layer=layer)
        collective = collective_of(node.target) if node.op == "call_function" else None
        yield Line(
            text=f"    {_statement(node, letters)}{_comment(node, layer)}",
            layer=layer,
            carries=collective.carries if collective is not None else "",
        )


def _annotation(node: Node, letters: Mapping[str, str]) -> str:
    text = text_of(value_of(node), letters)
    return f': "{text}"' if text else ""


def _comment(node: Node, layer: str) -> str:
    """Return a comment that says which pass wrote a node, for which layer, and whether autograd computes it again."""
    notes = [name] if (name := pass_of(node)) else []
    if notes and layer:
        notes.append(layer)
    again = node.meta.get("recompute")
    if again is not None:
        notes.append(f"recompute: {getattr(again, 'name', again)}")
    return _remark(", ".join(notes))


def _remark(text: str) -> str:
    return f"  # {text}" if text else ""


def _statement(node: Node, letters: Mapping[str, str]) -> str:
    if node.op == "output":
        return f"return {literal(node.args[0])}"
    if is_getitem(node):
        call = f"{literal(node.args[0])}[{_index(node.args[1])}]"
    elif node.op == "get_attr":
        call = f"self.{node.target}"
    elif node.op == "call_method":
        call = f"{literal(node.args[0])}.{node.target}({_arguments(node.args[1:], node.kwargs)})"
    elif node.op == "call_module":
        call = f"self.{node.target}({_arguments(node.args, node.kwargs)})"
    else:
        call = f"{_called(node.target)}({_arguments(node.args, node.kwargs)})"
    return f"{node.name}{_annotation(node, letters)} = {call}"


def _arguments(args: Any, kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*map(literal, args), *(f"{name}={literal(value)}" for name, value in kwargs.items())])


def _index(index: Any) -> str:
    """Return the text between square brackets."""
    if isinstance(index, tuple) and index:
        return ", ".join(map(_index, index)) + ("," if len(index) == 1 else "")
    if isinstance(index, slice):
        ends = ["" if end is None else literal(end) for end in (index.start, index.stop)]
        return ":".join(ends) + ("" if index.step is None else f":{literal(index.step)}")
    return literal(index)


def _called(target: Any) -> str:
    """Return the dotted name of a function."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{target}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    name = str(getattr(target, "__name__", target))
    module = getattr(target, "__module__", None)
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    dotted = f"{module}.{name}" if isinstance(module, str) else f"torch.{name}"
    return re.sub(r"[^\w.]", "_", dotted.replace("builtins.", ""))


class _Spelled(str):
    """A text that stands as it is in the ``repr`` of what it is in."""

    __repr__ = str.__str__


def literal(value: Any) -> str:
    """Return a value as it stands in Python code; something that parses, where it has no spelling."""
    return repr(map_aggregate(value, _spelled))


def _spelled(value: Any) -> Any:
    if isinstance(value, Enum):
        return _Spelled(f"{type(value).__name__}.{value.name}")
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, Node):
        return _Spelled(value.name)
    if isinstance(value, torch.device):
        return _Spelled(f"torch.device({str(value)!r})")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _Spelled(f"Sym({str(value)!r})")
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return _Spelled(value)
    if callable(value) and hasattr(value, "__name__"):
        return _Spelled(_called(value))
    return _Spelled("..." if value is Ellipsis else type(value).__name__)


def value_of(node: Node) -> Any:
    """Return the fake value of a node, in a graph of any kind; None if nothing is known."""
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def letters_of(graph: Graph) -> dict[str, str]:
    """Return the letter of each size that an operator of Hecate's brings into a graph."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        results, values = results_of(node), value_of(node)
        if results is not None and results.whole and isinstance(values, (list, tuple)):
            for index, value in enumerate(values):
                letter = results.letters[index % len(results.letters)]
                if letter and isinstance(value, torch.Tensor) and isinstance(value.shape[0], torch.SymInt):
                    found.setdefault(str(value.shape[0]), letter)
    return found


def text_of(value: Any, letters: Mapping[str, str]) -> str:
    """Return a value as an annotation, without quotes; "" if nothing is known."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(letters.get(str(size), str(size)) for size in value.shape)
        return f"{dtype_abbrs.get(value.dtype, str(value.dtype))}[{sizes}]"
    if isinstance(value, (list, tuple)):
        parts = [text_of(part, letters) or "?" for part in value[:4]]
        return f"({', '.join(parts)}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"Sym({letters.get(str(value), str(value))})"
    return type(value).__name__ if isinstance(value, (bool, int, float)) else ""
