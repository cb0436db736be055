"""Loops over experts that run as Python and leave experts out.

Each expert is then traced by itself, where it is called, and gathers its layer's experts from all ranks. That is slow
and right as long as every rank calls as many, and so wherever a loop calls all of them. If data choose the experts,
ranks are apart as soon as one has no token for an expert that another one calls: in the first step or hours later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn

from hecate.private import parameters_of
from hecate.runtime.state.layer import Layer
from hecate.wrap.expert_shards import is_expert_shard
from hecate.wrap.graph_breaks import nodes_of, python_around, user_frames
from hecate.wrap.shard import shard_of

_Loop = ast.For | ast.While | ast.ListComp | ast.GeneratorExp


def chosen_by_data(frame: FrameType, layer: Layer) -> str | None:
    """The lines of a loop that calls experts of a list by what data say; None if there is none around ``frame``.

    Args:
        frame: what calls one of them.
        layer: theirs.
    """
    # Step 1: the code of the module that has the list, and what it has called.
    inner: list[FrameType] = []
    of_owner = 0
    for found in user_frames(frame):
        inner.append(found)
        owner = _self(found)
        if owner is not None and any(_has(module, layer) for module in (owner, *_lists_of(owner))):
            of_owner = len(inner)
    # Step 2: whether any of it is in a loop that has a condition.
    for found in inner[:of_owner]:
        if _in_loop_with_condition(found):
            return python_around(found)
    return None


def _self(frame: FrameType) -> nn.Module | None:
    names = (*frame.f_code.co_varnames[:1], "self")
    values = (frame.f_locals.get(name) for name in names)
    return next((value for value in values if isinstance(value, nn.Module)), None)


def _has(module: nn.Module, layer: Layer) -> bool:
    shards = map(shard_of, parameters_of(module).values())
    return any(is_expert_shard(shard) and shard.layer is layer for shard in shards)


def _lists_of(module: nn.Module) -> Iterator[nn.Module]:
    """Lists that a module has, those within lists too."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
            yield from _lists_of(child)


def _in_loop_with_condition(frame: FrameType) -> bool:
    """Whether the line that runs is in a loop whose turns, or what they do, data decide."""
    line = frame.f_lineno
    loops = (node for node in nodes_of(frame.f_code.co_filename) if isinstance(node, _Loop))
    for loop in loops:
        if not loop.lineno <= line <= (loop.end_lineno or line) or loop.lineno < frame.f_code.co_firstlineno:
            continue
        if any(_by_data(test, frame) for test in _conditions(loop, line)):
            return True
        # A tensor of the numbers of experts that have tokens.
        over = loop.iter if isinstance(loop, ast.For) else None
        if isinstance(over, ast.Name) and isinstance(frame.f_locals.get(over.id), torch.Tensor):
            return True
    return False


def _conditions(loop: _Loop, line: int) -> Iterator[ast.expr]:
    """Of turns, of what is called in ``line``, and of what leaves a turn."""
    if isinstance(loop, ast.While):
        yield loop.test
    if isinstance(loop, (ast.ListComp, ast.GeneratorExp)):
        yield from (test for generator in loop.generators for test in generator.ifs)
    for node in ast.walk(loop):
        if isinstance(node, (ast.If, ast.IfExp)):
            leaves = any(isinstance(inner, (ast.Continue, ast.Break)) for inner in ast.walk(node))
            if leaves or node.lineno <= line <= (node.end_lineno or line):
                yield node.test


def _by_data(test: ast.expr, frame: FrameType) -> bool:
    """Whether a condition reads what can come from data: values of the function that are no modules, no options."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} & frame.f_locals.keys()
    return not all(isinstance(frame.f_locals[name], (nn.Module, str, float, type(None))) for name in names)
