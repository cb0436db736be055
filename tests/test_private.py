"""One file has every private name of the libraries that Hecate is built on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.test_import_order import MODULES

TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items() if module != "hecate.private"}
# Of Python itself, and of the C++ runtime, which ctypes is asked for.
ELSEWHERE = {"_getframe", "_exit", "_current_frames", "_ZSt13set_terminatePFvvE"}
# What a class of Hecate's may call its own attributes, and torch does, too.
TORCHS = {name for name in (*dir(nn.Linear(1, 1)), *vars(nn.Linear(1, 1)), *dir(torch.zeros(1))) if name[:1] == "_"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def assigned_in(tree: ast.AST) -> Iterator[str]:
    """Names that the project itself defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in (inner for each in targets for inner in ast.walk(each)):
            if isinstance(target, ast.Name):
                yield target.id
            elif isinstance(target, ast.Attribute) and is_self(target.value):
                yield target.attr


OWN = {name for tree in TREES.values() for name in assigned_in(tree)} | ELSEWHERE


def is_foreign(node: ast.Attribute) -> bool:
    """Whether an attribute is private and of another library. ATen's operators are what graphs consist of."""
    if not is_private(node.attr) or is_self(node.value):
        return False
    holder = ast.unparse(node.value)
    if holder.endswith("aten") or node.attr in ELSEWHERE:
        return False
    return node.attr not in OWN or node.attr in TORCHS or holder.split(".")[0] in ("torch", "dist", "transformers")


def foreign(tree: ast.AST) -> Iterator[str]:
    """Private attributes that the project does not define, and private modules and names that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_foreign(node):
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("hecate"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (f"line {node.lineno}: {node.module}.{name}" for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (f"line {node.lineno}: {name}" for name in names if any(map(is_private, name.split("."))))


@pytest.mark.parametrize("module", TREES)
def test_private_names_are_in_one_file(module: str) -> None:
    assert not list(foreign(TREES[module])), "hecate.private is where these are"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch._x import y", 1),
        ("from torch.x import _y", 1),
        ("import torch._z", 1),
        ("module._parameters", 1),
        ("torch.x._own", 1),
        ("tensor._nobodys", 1),
        ("self._own", 0),
        ("torch.ops.aten._softmax", 0),
    ],
)
def test_what_private_names_look_like(code: str, found: int) -> None:
    assert len(list(foreign(ast.parse(code)))) == found
