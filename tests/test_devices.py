"""Tensors are made on a device that is named: a user may have set another default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hecate.passes as passes

ROOT = Path(__file__).parents[1]
MAKE = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "eye", "linspace")
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("runtime", "passes", "hecate_compile")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)
)


def without_device(source: str) -> Iterator[str]:
    """Calls of torch that make a tensor where the default device is."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in MAKE
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_the_search_finds_some() -> None:
    assert list(without_device("x = torch.zeros(3)")) == ["line 1: torch.zeros(3)"]
    assert not list(without_device("x = torch.zeros(3, device=d) + torch.ones(2, **like)"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_tensor_is_made_on_the_default_device(path: Path) -> None:
    assert not list(without_device((ROOT / path).read_text()))


def test_no_operator_may_be_captured_in_a_cuda_graph() -> None:
    """They talk to the host and to other ranks, which a replay would not."""
    assert passes.PASSES
    operators = [getattr(torch.ops.hecate, name).default for name in dir(torch.ops.hecate) if name[0] != "_"
                 and isinstance(getattr(torch.ops.hecate, name), torch._ops.OpOverloadPacket)]  # fmt: skip
    assert len(operators) > 20
    assert all(torch.Tag.cudagraph_unsafe in operator.tags for operator in operators)
