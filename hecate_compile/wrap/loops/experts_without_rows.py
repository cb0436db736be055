"""Prove that experts of a list do nothing where they are given no rows."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from hecate.private import BatchNormBase
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.loops.spellings import (
    CHANGES,
    REDUCES,
    VIEWS,
    is_load,
    is_method,
    text_of,
)


def keeps_rows(node: ast.Call) -> bool:
    """Return whether a call reduces other dimensions than the first, or is an element-wise maximum or minimum."""
    assert isinstance(node.func, ast.Attribute)
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    given = [*node.args, *(options[name] for name in ("dim", "axis") if name in options)]
    for value in given:
        try:
            dims = ast.literal_eval(value)
        except ValueError:
            continue
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        if all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims) and 0 not in dims:
            return True
    operands = len(node.args) + (text_of(node.func.value) not in ("torch", "F"))
    numbers = any(isinstance(value, (ast.Constant, ast.UnaryOp)) for value in node.args)
    return node.func.attr in ("max", "min") and ((operands == 2 and not numbers) or "other" in options)


def minds_no_rows(experts: ExpertsModule) -> str | None:
    """Return what an expert of a list does although it has no rows, and where; None if nothing is seen."""
    done: set[type] = set()
    for member in experts.members:
        for module in member.modules():
            if isinstance(module, BatchNormBase) and module.track_running_stats:
                return f"{type(module).__name__}, whose statistics are of the rows that it is given"
            cls = type(module)
            if cls in done or cls.__module__.partition(".")[0] == "torch":
                continue
            done.add(cls)
            found = next(_found_in(cls), None)
            if found is not None:
                return found
    return None


def _found_in(cls: type) -> Iterator[str]:
    todo, seen = ["forward"], set()
    while todo:
        name = todo.pop()
        function: Any = getattr(cls, name, None)
        function = function if function is None else inspect.unwrap(function)
        if name in seen or not inspect.isfunction(function) or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(name)
        try:
            lines, start = inspect.getsourcelines(function)
            definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        if not isinstance(definition, ast.FunctionDef):
            continue
        ast.increment_lineno(definition, start - 1)
        for node in _Reader(definition).find():
            yield f"`{text_of(node)}` in {function.__code__.co_filename}:{node.lineno}"
        calls = (n for n in ast.walk(definition) if is_method(n) and text_of(n.func.value) == "self")
        todo += [call.func.attr for call in calls]


class _Reader:
    """Finds statements whose effect outlives a call, and expressions that are not defined without rows."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.definition = definition
        given = definition.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        self.receiver = arguments[0].arg if arguments else ""
        # Names that the rows may be in: what else is reduced, such as a weight, is there without rows, too.
        self.rows = {argument.arg for argument in arguments[1:]}
        self.local = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and not is_load(n)} | self.rows

    def find(self) -> Iterator[ast.stmt | ast.expr]:
        nodes = [n for n in ast.walk(self.definition) if isinstance(n, (ast.stmt, ast.expr))]
        self._follow_rows(nodes)
        for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
                if any(not isinstance(one, ast.Name) and not self._is_local(one) for one in flat):
                    yield node
            elif is_method(node):
                name = node.func.attr
                changes = (name.endswith("_") and not name.endswith("__")) or name in CHANGES
                reduces = name in REDUCES and not keeps_rows(node)
                outlives = changes and not (self._is_local(node.func.value) or self._is_function(node))
                if outlives or (reduces and any(map(self._loads_rows, (node.func.value, *node.args[:1])))):
                    yield node

    def _follow_rows(self, nodes: list[ast.stmt | ast.expr]) -> None:
        before = -1
        while len(self.rows) != before:
            before = len(self.rows)
            for node in nodes:
                if isinstance(node, (ast.Assign, ast.AugAssign)) and self._loads_rows(node.value):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    stored = (n for target in targets for n in ast.walk(target))
                    self.rows |= {n.id for n in stored if isinstance(n, ast.Name) and not is_load(n)}

    def _loads_rows(self, node: ast.AST) -> bool:
        return any(is_load(n) and n.id in self.rows for n in ast.walk(node))

    def _is_local(self, node: ast.expr) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)) or (is_method(node) and node.func.attr in VIEWS):
            node = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else node.func.value
        if isinstance(node, ast.Name):
            return node.id != self.receiver and node.id in self.local
        return True

    def _is_function(self, node: ast.Call) -> bool:
        assert isinstance(node.func, ast.Attribute)
        first = node.args[0] if node.args else None
        of_module = text_of(node.func.value).split(".")[0] in ("torch", "F", "nn")
        return of_module and first is not None and self._is_local(first)
