"""Shapes of values, as text: ``f32[R', 16]``.

Sizes that no graph knows, because they differ between ranks and steps, have the letters of the glossary
(``docs/glossary.md``), as the operators that they come from were registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from hecate.passes.dumps.value_names import results_of
from hecate.private import dtype_abbrs

LEGEND = "K replicas here, S slots here, R rows sent, R' rows computed here; u0, s0, ... other sizes that vary"


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
