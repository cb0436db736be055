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


# A copy from memory that is not pinned waits for all that was launched on its stream. These run seldom: at the start,
# and in measured steps.
SELDOM = {
    Path("runtime/comm/start.py"),
    Path("runtime/comm/measure_rates.py"),
    Path("runtime/state/overlap_window.py"),
}
OFTEN = [path for path in FILES if path.parts[0] == "runtime" and path not in SELDOM]


def copies_that_wait(source: str) -> Iterator[str]:
    """Numbers of the host that are brought to a device in another way than by ``on_device``."""
    tree = ast.parse(source)
    allowed = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "on_device"]
    inside = {id(child) for node in allowed for child in ast.walk(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)) or id(node) in inside:
            continue
        made = ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor")
        devices = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "device"]
        moved = node.func.attr in ("to", "cuda")
        from_host = "torch.from_numpy(" in ast.unparse(node.func) or "torch.tensor(" in ast.unparse(node.func)
        if (made and devices != ["'cpu'"]) or (moved and from_host):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_the_search_finds_copies() -> None:
    assert list(copies_that_wait("torch.tensor([n], device=device)"))
    assert list(copies_that_wait("torch.from_numpy(n).to(like.device)"))
    assert list(copies_that_wait("torch.tensor(n, device='cpu').cumsum(0).to(torch.int32).to(like.device)"))
    assert not list(copies_that_wait("torch.tensor([n], device='cpu') + torch.from_numpy(n)"))
    assert not list(copies_that_wait("def on_device(n, d):\n    return torch.from_numpy(n).pin_memory().to(d)"))


@pytest.mark.parametrize("path", OFTEN, ids=str)
def test_no_copy_to_a_device_waits_for_it(path: Path) -> None:
    assert not list(copies_that_wait((ROOT / path).read_text()))


def test_the_search_finds_some() -> None:
    assert list(without_device("x = torch.zeros(3)")) == ["line 1: torch.zeros(3)"]
    assert not list(without_device("x = torch.zeros(3, device=d) + torch.ones(2, **like)"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_tensor_is_made_on_the_default_device(path: Path) -> None:
    assert not list(without_device((ROOT / path).read_text()))


def test_no_operator_may_be_captured_in_a_cuda_graph() -> None:
    """They talk to the host and to other ranks, which a replay would not."""
    assert passes.PASSES
    operators = [
        getattr(torch.ops.hecate, name).default
        for name in dir(torch.ops.hecate)
        if name[0] != "_" and isinstance(getattr(torch.ops.hecate, name), torch._ops.OpOverloadPacket)
    ]
    assert len(operators) > 20
    assert all(torch.Tag.cudagraph_unsafe in operator.tags for operator in operators)
