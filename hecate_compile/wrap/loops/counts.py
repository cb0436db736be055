"""Give ``torch.bincount(ids, minlength=E)`` a length of E elements.

It has more if an id is larger, so no graph knows its length. ``index_add`` counts the same and raises for such an id.
"""

from __future__ import annotations

import ast

from hecate.wrap.loops.syntax import expression, is_method, text_of


class Counts(ast.NodeTransformer):
    """Gives ``torch.bincount(ids, minlength=E)`` its E elements."""

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
