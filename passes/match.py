"""Patterns of calls in captured graphs, and the names that models have for one and the same thing.

A new idiom is a pattern in the pass that knows it. A pattern is one of

    "rows"                            anything; the same wherever the name comes again
    0, (slice(None), None)            this constant
    call("cumsum", casts("counts"))   a function or method of this name, whose first arguments match
    casts(p), shaped(p)               p, or casts of it; p in any shape
    one_of(p, q)                      the first that matches

and :func:`match` gives what the names stand for:

>>> graph = torch.fx.Graph()
>>> x = graph.placeholder("x")
>>> order = graph.call_function(torch.argsort, (x,))
>>> match(ORDER, order) == {"values": x, "sort": order}
True
>>> match(call("cumsum", "counts"), order) is None
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

# Methods that leave all values in place and unchanged but for rounding.
CASTS = (
    "to", "float", "double", "half", "bfloat16", "int", "long", "type_as", "contiguous", "clone",
)  # fmt: skip
SHAPES = ("view", "reshape", "flatten", "unsqueeze")

Found = dict[str, Any]
Pattern = Any
_Matches = Callable[[Any, Found], bool]


_OPERATORS = ("torch.ops.aten", "torch.ops.prim", "torch.ops.hecate")
_FUNCTIONS = ("torch", "_operator", "builtins", "math", "hecate.")


def name_of(node: object) -> str:
    """Return the name of the function or method that a node calls; "" for all else."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    target: Any = node.target
    if isinstance(target, str):
        return target
    # Builtins of torch have no module. Of another library's operators and functions a name says nothing.
    module = getattr(target, "__module__", None) or "torch"
    known = module.startswith(_OPERATORS) if module.startswith("torch.ops.") else module.startswith(_FUNCTIONS)
    return str(getattr(target, "__name__", "")) if known else ""


def named(node: object, *names: str) -> bool:
    """Tell whether a node calls a function or method of one of these names."""
    return name_of(node) in names


def is_cast(node: object) -> bool:
    """Tell whether a method leaves all values in place and unchanged but for rounding."""
    return isinstance(node, Node) and node.op == "call_method" and node.target in CASTS


def uncast(node: Any) -> Any:
    """Return the node of which ``node`` is a cast that keeps whole numbers exact, which excludes casts to 16 bits."""
    while is_cast(node) and not _rounds(node):
        node = node.args[0]
    return node


def match(pattern: Pattern, value: Any) -> Found | None:
    """Return what the names in a pattern stand for in ``value``, a node or an argument; None if it differs."""
    found: Found = {}
    return found if _matches(pattern, value, found) else None


def call(*names_and_arguments: Pattern, names: tuple[str, ...] = (), only: bool = False, bind: str = "") -> _Matches:
    """Return a pattern of a call by name: one or ``names``, then patterns of the first positional arguments.

    ``only`` forbids further ones; ``bind`` names the node itself.
    """
    wanted = names or (names_and_arguments[0],)
    patterns = names_and_arguments if names else names_and_arguments[1:]

    def matches(node: Any, found: Found) -> bool:
        if not named(node, *wanted) or len(node.args) < len(patterns) or (only and len(node.args) > len(patterns)):
            return False
        if bind:
            found[bind] = node
        return all(_matches(one, given, found) for one, given in zip(patterns, node.args, strict=False))

    return matches


def one_of(*patterns: Pattern) -> _Matches:
    """Return a pattern that matches as the first of several patterns that does."""

    def matches(value: Any, found: Found) -> bool:
        for pattern in patterns:
            tried = dict(found)
            if _matches(pattern, value, tried):
                found.update(tried)
                return True
        return False

    return matches


def casts(pattern: Pattern) -> _Matches:
    """Return a pattern of values that match under casts which keep whole numbers exact."""
    return lambda node, found: _matches(pattern, uncast(node), found)


def shaped(pattern: Pattern) -> _Matches:
    """Return a pattern of values that match in any shape, and under casts."""

    def matches(node: Any, found: Found) -> bool:
        while named(node := uncast(node), *SHAPES) and node.args:
            node = node.args[0]
        return _matches(pattern, node, found)

    return matches


def _rounds(cast: Node) -> bool:
    value = cast.meta.get("example_value")
    sixteen = (torch.float16, torch.bfloat16)
    return cast.target in ("half", "bfloat16") or (isinstance(value, torch.Tensor) and value.dtype in sixteen)


def _matches(pattern: Pattern, value: Any, found: Found) -> bool:
    if callable(pattern):
        return bool(pattern(value, found))
    if isinstance(pattern, str):
        return found.setdefault(pattern, value) is value
    return type(pattern) is type(value) and bool(pattern == value)


# 0, 1, 2, ... in any shape, and in one line.
LINE = one_of(call("arange", "end", only=True), call("arange", 0, "end", only=True))
RANGE = shaped(LINE)
# The permutation by which values are sorted.
ORDER = one_of(
    call("getitem", call("sort", "values", bind="sort"), 1, only=True), call("argsort", "values", bind="sort")
)
