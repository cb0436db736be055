"""Tell which names of a function are integers of the host: counts that were read, and sums of these."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hecate.wrap.loops.spellings import given_to, is_load, is_method, text_of


class Integers:
    """Names that are given integers alone, and nothing by a caller."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        # By name: what it is given, of which one that is not understood is None.
        self._given: dict[str, list[ast.expr | None]] = {}
        for node in ast.walk(definition):
            for name, value in _stores(node):
                self._given.setdefault(name, []).append(value)
        self._lists = {name for name, values in self._given.items() if all(map(_is_list, values))}
        # Names may be given each other, so all are until one is not.
        self._names = set(self._given) - self._lists
        while wrong := {name for name in self._names if not all(map(self.has, self._given[name]))}:
            self._names -= wrong

    def has(self, value: ast.expr | None) -> bool:
        """Return whether a value is an integer."""
        if isinstance(value, ast.Constant):
            return type(value.value) is int
        if isinstance(value, ast.BinOp):
            return (
                isinstance(value.op, (ast.Add, ast.Sub, ast.Mult)) and self.has(value.left) and self.has(value.right)
            )
        if isinstance(value, ast.IfExp):
            return self.has(value.body) and self.has(value.orelse)
        if isinstance(value, ast.Subscript):
            return not isinstance(value.slice, ast.Slice) and self._is_of_list(value.value)
        if isinstance(value, ast.Call):
            return text_of(value.func) in ("int", "len")
        return value is not None and is_load(value) and value.id in self._names

    def _is_of_list(self, value: ast.expr) -> bool:
        return _is_list(value) or (is_load(value) and value.id in self._lists)


def _is_list(value: ast.expr | None) -> bool:
    """Return whether a value is ``x.tolist()``."""
    return value is not None and is_method(value) and value.func.attr == "tolist" and not given_to(value)


def _stores(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield names that a node stores to, each with what it is given."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _parts(target, node.value)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, ast.BinOp(left=ast.Constant(0), op=node.op, right=node.value)
    elif isinstance(node, ast.For):
        yield from _parts(node.target, _element_of(node.iter))
    elif isinstance(node, ast.arg):
        yield node.arg, None
    elif isinstance(node, (ast.comprehension, ast.NamedExpr, ast.AnnAssign)):
        yield from _parts(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from _parts(node.optional_vars, None)


def _parts(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else []
        for number, part in enumerate(target.elts):
            yield from _parts(part, values[number] if values else None)
    elif isinstance(target, ast.Starred):
        yield from _parts(target.value, None)


def _element_of(series: ast.expr) -> ast.expr | None:
    """Return what a loop over a series gives its target in each turn."""
    function = text_of(series.func) if isinstance(series, ast.Call) else ""
    if function == "range":
        return ast.Constant(0)
    if isinstance(series, ast.Call) and function in ("enumerate", "zip") and not series.keywords:
        elements = [_element_of(given) or ast.Constant(None) for given in series.args]
        return ast.Tuple(elts=[ast.Constant(0), *elements[:1]] if function == "enumerate" else elements)
    return ast.Subscript(value=series, slice=ast.Constant(0), ctx=ast.Load())
