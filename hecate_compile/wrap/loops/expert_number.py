"""Replace a loop's variable, a tensor of one expert's number, by the number itself."""

from __future__ import annotations

import ast

from hecate.wrap.loops.syntax import LeftAlone, given_to, is_load, names_assigned, text_of


class ExpertNumber(ast.NodeTransformer):
    """Rewrites uses of the loop's variable, a tensor of one expert's number, as uses of the number itself."""

    def __init__(self, name: str, mask: str, is_number: bool, listed: bool) -> None:
        self.name, self.mask, self.is_number, self.listed = name, mask, is_number, listed
        self._known: set[int] = set()

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the statement, rewritten; nothing for ``expert = expert[0]``."""
        changed = self.visit(node)
        for inner in ast.walk(changed):
            if self._is_it(inner) and id(inner) not in self._known:
                raise LeftAlone(f"{self.name} is used in {text_of(changed)}")
        if any(isinstance(n, ast.Name) and n.id == self.name and not is_load(n) for n in ast.walk(changed)):
            if (
                not isinstance(changed, ast.Assign)
                or names_assigned(changed) != [self.name]
                or not self._is_it(changed.value)
            ):
                raise LeftAlone(f"{self.name} becomes something else in {text_of(changed)}")
            self.is_number = True
            return []
        return [changed]

    def _is_it(self, node: ast.AST) -> bool:
        return is_load(node) and node.id == self.name

    def _number(self, at: ast.AST) -> ast.Name:
        name = ast.copy_location(ast.Name(self.name, ast.Load()), at)
        self._known.add(id(name))
        return name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_it(node.value):
            if text_of(node.slice) != "0" or self.is_number:
                raise LeftAlone(f"{text_of(node)} is no number")
            return self._number(node)
        self.generic_visit(node)
        # A list of modules takes either; anything else indexed with a row of one number has one dimension more.
        if self._is_it(node.slice) and (self.is_number or (self.listed and text_of(node.value) == "self.experts")):
            node.slice = self._number(node.slice)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node.left):
            node.left = self._number(node.left)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute) and self._is_it(function.value):
            if function.attr not in ("item", "tolist") and (function.attr != "squeeze" or self.is_number):
                raise LeftAlone(f"{text_of(node)} is no number")
            if given_to(node) or (function.attr == "tolist" and not self.is_number):
                raise LeftAlone(f"{text_of(node)} is no number")
            return self._number(node)
        if isinstance(function, ast.Attribute) and function.attr == "squeeze" and given_to(node) == ["0"]:
            owner = function.value
            if isinstance(owner, ast.Subscript) and self._is_it(owner.slice) and not self.is_number:
                # mask[[3]] has a first dimension more than mask[3].
                owner.slice = self._number(owner.slice)
                return owner
        self.generic_visit(node)
        if text_of(function) == "int" and len(node.args) == 1 and self._is_it(node.args[0]):
            return self._number(node)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node.value) and self.is_number:
            node.value = self._number(node.value)
        return node
