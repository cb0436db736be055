"""Questions about Python's syntax trees."""

from __future__ import annotations

import ast
from typing import TypeGuard


class LeftAlone(Exception):
    """A loop cannot be changed; the message says why."""


def text_of(node: ast.AST) -> str:
    return ast.unparse(node)


def is_comment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def given_to(node: ast.Call) -> list[str]:
    """Return the arguments of a call, as text."""
    return [text_of(one) for one in node.args] + [f"{one.arg}={text_of(one.value)}" for one in node.keywords]


def is_load(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


class Method(ast.Call):
    func: ast.Attribute


def is_method(node: ast.AST) -> TypeGuard[Method]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def names_assigned(node: ast.AST) -> list[str]:
    """Return the names that a statement gives values to; none if it writes anything else, too."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [t.id for t in flat if isinstance(t, ast.Name)] if all(isinstance(t, ast.Name) for t in flat) else []
