"""Rewrite lists of rows and counts that a loop over experts makes in Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from hecate.wrap.loops.spellings import (
    expression,
    given_to,
    gives_a_value,
    is_load,
    is_method,
    names_assigned,
    searched_by,
    text_of,
)


class RowLists(ast.NodeTransformer):
    """Picks rows by their numbers where a function makes lists of these: ``x[rows.tolist()]`` is ``x[rows]``."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.lines: list[int] = []
        self._nodes = list(ast.walk(definition))
        blocks = [block for node in self._nodes for block in _blocks_of(node)]
        # By name of a list: that of its numbers.
        self._numbers = {
            one: rows
            for block in blocks
            for number, node in enumerate(block)
            if isinstance(node, ast.Assign) and _is_list_of_name(node.value)
            for one, rows in self._list(node, block[number + 1 :])
        }

    def _list(self, node: ast.Assign, behind: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
        """Yield the names of a list and its numbers, if the statements behind it in its block pick by it alone."""
        (name, *more), rows = [*names_assigned(node), ""], text_of(node.value).removesuffix(".tolist()")
        found = [n for n in self._nodes if isinstance(n, ast.Assign) and rows in names_assigned(n)]
        reached = {id(n) for statement in behind for n in ast.walk(statement)}
        picks = {
            id(index)
            for n in self._nodes
            if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)
            for index in (n.slice.elts if isinstance(n.slice, ast.Tuple) else [n.slice])
        }
        loads = [n for n in self._nodes if is_load(n) and n.id == name]
        if (
            more == [""]
            and len(found) == 1
            and _is_of_rows(found[0].value)
            and [sum(gives_a_value(n, one) for n in self._nodes) for one in (name, rows)] == [1, 1]
            and all(id(n) in picks and id(n) in reached for n in loads)
        ):
            yield name, rows

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if names_assigned(node)[:1] and names_assigned(node)[0] in self._numbers:
            self.lines.append(node.lineno)
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if is_load(node) and node.id in self._numbers:
            return ast.copy_location(ast.Name(self._numbers[node.id], ast.Load()), node)
        return node


def _blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements that a statement has."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


def _is_of_rows(value: ast.expr) -> bool:
    """Return whether a value is numbers from a search, one tensor for each dimension."""
    search = value.value if isinstance(value, ast.Subscript) else value
    return searched_by(value) is not None and is_method(search) and search.func.attr in ("where", "nonzero")


def _is_list_of_name(node: ast.expr) -> bool:
    return (
        is_method(node)
        and node.func.attr == "tolist"
        and not given_to(node)
        and isinstance(node.func.value, ast.Name)
    )


class Counts(ast.NodeTransformer):
    """Gives ``torch.bincount(ids, minlength=E)`` a length of E elements; ``index_add`` raises for a larger id."""

    def __init__(self, lines: list[int]) -> None:
        self.lines = lines

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        # bincount(...)[:E] knows ids beyond E, of tokens that were dropped.
        return node if isinstance(node.slice, ast.Slice) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not is_method(node) or node.func.attr != "bincount":
            return node
        given = [*node.args] if text_of(node.func.value) == "torch" else [node.func.value, *node.args]
        length = [keyword.value for keyword in node.keywords if keyword.arg == "minlength"]
        if len(given) != 1 or len(length) != 1 or len(node.keywords) != 1:
            return node
        self.lines.append(node.lineno)
        count = expression("(lambda ids, size: ids.new_zeros(size).index_add(0, ids, ids.new_ones(ids.shape)))(0, 0)")
        assert isinstance(count, ast.Call)
        # In int64, as bincount counts.
        number = ast.Call(func=ast.Attribute(value=given[0], attr="long", ctx=ast.Load()), args=[], keywords=[])
        count.args = [number, length[0]]
        return ast.copy_location(count, node)
