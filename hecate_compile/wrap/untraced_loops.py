"""Loops over experts that run as Python and leave experts out.

Each expert then gathers its layer's experts where it is called: slow, and right as long as every rank calls as many.
If data choose the experts, by a condition anywhere between the loop and the line that reads a parameter, ranks are
apart as soon as one has no token for an expert that another calls: in the first step or hours later.
"""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch import nn

from hecate.private import parameters_of
from hecate.runtime.state.layer import Layer
from hecate.wrap.data_names import DataNames, holds
from hecate.wrap.expert_shards import is_expert_shard
from hecate.wrap.find_experts import STACK
from hecate.wrap.graph_breaks import Place, innermost, places_in, python_around, shown, user_frames
from hecate.wrap.shard import shard_of

_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Loop = ast.For | ast.While | _Comprehension
_LEAVES_IN_FRONT, _LEAVES_LATER = (ast.Return, ast.Break, ast.Continue), (ast.Return, ast.Break)


@dataclass(frozen=True, eq=False)
class _Line:
    """A line that runs, in its function, with values of local names and the module whose method it is in."""

    place: Place
    function: ast.FunctionDef
    values: Mapping[str, Any]
    owner: nn.Module | None
    frame: FrameType | None = None  # None if the line was traced; then only self is known

    @property
    def number(self) -> int:
        return self.place[1]


def chosen_by_data(frame: FrameType, layer: Layer, traces: Iterable[str]) -> str | None:
    """Return the lines of a loop that calls a layer's listed experts by what data say; None if there is none.

    ``frame`` called what was traced; ``traces`` are stacks of that code, as torch prints them, at reads of experts.
    """
    running = [line for found in user_frames(frame) if (line := _running(found)) is not None]
    modules = list(_from_experts_out(running, layer))
    for trace in dict.fromkeys(traces):
        traced = [_traced(place, modules) for place in places_in(trace)]
        lines = [line for line in reversed(traced) if line is not None] + running
        found = _chosen_between(_inside_owner(_folded(lines), layer))
        if found is not None:
            return found
    return None


def _running(frame: FrameType) -> _Line | None:
    place = (frame.f_code.co_filename, frame.f_lineno)
    function = innermost(*place, ast.FunctionDef)
    if function is None:
        return None
    names = (*frame.f_code.co_varnames[:1], "self")
    owner = next((value for name in names if isinstance(value := frame.f_locals.get(name), nn.Module)), None)
    return _Line(place, function, frame.f_locals, owner, frame)


def _from_experts_out(running: list[_Line], layer: Layer) -> Iterator[nn.Module]:
    """Modules: the experts of a layer, those that have them, and then all within the outermost of these."""
    root = next((line.owner for line in running if line.owner is not None and _contains(line.owner, layer)), None)
    if root is None:
        return
    path = [root]
    while not _has(path[-1], layer):
        path.append(next(child for child in path[-1].children() if _contains(child, layer)))
    yield from path[-1].modules()
    yield from reversed(path)
    yield from root.modules()


def _traced(place: Place, modules: list[nn.Module]) -> _Line | None:
    """A line of what was traced; the first module of the class whose method it is in stands for its ``self``."""
    function, cls = innermost(*place, ast.FunctionDef), innermost(*place, ast.ClassDef)
    if function is None:
        return None
    alike = (m for m in modules if cls is not None and cls.name in (base.__name__ for base in type(m).__mro__))
    owner = next(alike, None)
    return _Line(place, function, {"self": owner} if owner is not None else {}, owner)


def _folded(lines: list[_Line]) -> list[_Line]:
    """One line of each function: Dynamo cuts them into several, and a comprehension has a frame of its own."""
    folded: list[_Line] = []
    for outer in lines:
        inner = folded[-1] if folded else outer
        if inner is outer or inner.function is not outer.function:
            folded.append(outer)
            continue
        # What runs knows better than what was traced.
        first, second = (inner, outer) if inner.frame is not None else (outer, inner)
        values, owner = {**second.values, **first.values}, first.owner or second.owner
        folded[-1] = replace(inner, values=values, owner=owner, frame=first.frame)
    return folded


def _inside_owner(lines: list[_Line], layer: Layer) -> list[_Line]:
    """Lines of the code of the module that has the experts, and of what that has called; from the inside out."""
    owner: nn.Module | None = None
    inside = 0
    for count, line in enumerate(lines, 1):
        if owner is None and _contains(line.owner, layer):
            owner = line.owner
        if line.owner is not None and owner is not None and (line.owner is owner or _has_list(line.owner, layer)):
            inside = count
    return lines[:inside]


def _contains(module: nn.Module | None, layer: Layer) -> bool:
    return module is not None and any(_has(inner, layer) for inner in module.modules())


def _has(module: nn.Module, layer: Layer) -> bool:
    stack = module.__dict__.get(STACK, module)
    shards = map(shard_of, parameters_of(stack).values())
    return any(is_expert_shard(shard) and shard.layer is layer for shard in shards)


def _has_list(module: nn.Module, layer: Layer) -> bool:
    lists = (child for child in module.children() if isinstance(child, (nn.ModuleList, nn.ModuleDict)))
    return _has(module, layer) or any(_has_list(child, layer) for child in lists)


def _chosen_between(lines: list[_Line]) -> str | None:
    """Lines of text: the outermost loop and the first condition of data within it, if there are any."""
    loop: _Line | None = None
    caller: tuple[_Line, DataNames] | None = None
    for line in reversed(lines):
        data = _data_names(line, caller)
        caller = line, data
        start: ast.AST = line.function
        if loop is None:
            loops = [node for node in ast.walk(start) if _is_loop(node) and holds(node, line.number)]
            if not loops:
                continue
            loop, start = line, loops[0]
        calls = [node for node in ast.walk(start) if isinstance(node, ast.Call) and holds(node, line.number)]
        decides: list[ast.expr] = [test for test in _conditions(start, line.number) if data.reads(test)]
        decides += [call for call in calls if data.picks(call)]
        if decides:
            frame = next((one.frame for one in lines[lines.index(loop) :] if one.frame is not None), None)
            text = python_around(frame)
            decided = shown(line.place[0], decides[0].lineno)
            return text if decided in text else f"{text}\nData decide here:\n  {decided}"
    return None


def _data_names(line: _Line, caller: tuple[_Line, DataNames] | None) -> DataNames:
    """Names that come from data in a function: tensors, and numbers that it is given, unless the call tells more."""
    arguments = line.function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    values = ChainMap(dict(line.values), line.frame.f_globals if line.frame is not None else {})
    known: set[str] = set()
    if caller is not None:
        if line.function in ast.walk(caller[0].function):
            known = caller[1].names
        given = _given(line.function, names, *caller)
        if given is not None:
            return DataNames(line.function, line.number, values, known | given, set())
    if line.frame is not None:
        assumed = {name for name in names if isinstance(line.values.get(name), int)}
    else:
        options = zip(reversed(names), reversed(arguments.defaults), strict=False)
        assumed = set(names) - {name for name, value in options if isinstance(value, ast.Constant)}
    return DataNames(line.function, line.number, values, known, assumed)


def _given(function: ast.FunctionDef, names: list[str], caller: _Line, data: DataNames) -> set[str] | None:
    """The arguments of a function that come from data where it is called; None if the call is not found."""
    calls = [node for node in ast.walk(caller.function) if isinstance(node, ast.Call) and holds(node, caller.number)]
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == function.name]
    if function.name == "forward":
        named += [call for call in calls if isinstance(data.value(call.func), nn.Module)]
    unpacks = (isinstance(one, ast.Starred) for call in named for one in call.args)
    if not named or any(unpacks) or any(keyword.arg is None for call in named for keyword in call.keywords):
        return None
    pairs = [pair for call in named for pair in zip(names, call.args, strict=False)]
    pairs += [(keyword.arg, keyword.value) for call in named for keyword in call.keywords if keyword.arg is not None]
    return {name for name, value in pairs if data.reads(value)}


def _is_loop(node: ast.AST) -> bool:
    maps = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "map"
    return isinstance(node, _Loop) or maps


def _conditions(node: ast.AST, line: int, *, looping: bool = False) -> Iterator[ast.expr]:
    """Expressions that decide whether a line in ``node`` runs and, if it is in a loop, how often."""
    match node:
        case ast.While(test=test):
            yield test
        case ast.If(test=test, body=body, orelse=orelse) if any(holds(one, line) for one in (*body, *orelse)):
            yield test
        case ast.Match():
            yield from _tests_of_cases(node)
        case ast.IfExp(test=test, body=body, orelse=orelse) if _calls(body, line) or _calls(orelse, line):
            yield test
        case ast.BoolOp(values=values):
            yield from (one for at, one in enumerate(values, 1) if any(_calls(later, line) for later in values[at:]))
        case ast.For(iter=ast.Call(func=ast.Name(id="range")) as turns):
            yield turns
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            yield from (test for generator in node.generators for test in generator.ifs)
    looping = looping or isinstance(node, _Loop)
    for block in _blocks(node):
        if any(holds(one, line) for one in block):
            for one in block:
                if one.lineno > line and looping:
                    yield from _leaving(one, _LEAVES_LATER)
                elif (one.end_lineno or line) < line:
                    yield from _leaving(one, _LEAVES_IN_FRONT)
    for child in ast.iter_child_nodes(node):
        if holds(child, line) or not hasattr(child, "lineno"):
            yield from _conditions(child, line, looping=looping)


def _leaving(node: ast.AST, kinds: tuple[type[ast.stmt], ...]) -> Iterator[ast.expr]:
    """Expressions that decide whether a statement skips those beside it; one that raises ends the program instead."""
    if not _leaves(node, kinds):
        return
    if isinstance(node, (ast.If, ast.While)):
        yield node.test
    elif isinstance(node, ast.Match):
        yield from _tests_of_cases(node)
    for child in ast.iter_child_nodes(node):
        yield from _leaving(child, _kinds_within(node, kinds))


def _leaves(node: ast.AST, kinds: tuple[type[ast.stmt], ...]) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return False
    inner = _kinds_within(node, kinds)
    return isinstance(node, kinds) or any(_leaves(child, inner) for child in ast.iter_child_nodes(node))


def _kinds_within(node: ast.AST, kinds: tuple[type[ast.stmt], ...]) -> tuple[type[ast.stmt], ...]:
    """Kinds of statements within ``node`` that leave it; an inner loop is not left by ending its turns."""
    return (ast.Return,) if isinstance(node, (ast.For, ast.While)) else kinds


def _tests_of_cases(node: ast.Match) -> Iterator[ast.expr]:
    yield node.subject
    yield from (case.guard for case in node.cases if case.guard is not None)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


def _calls(node: ast.expr, line: int) -> bool:
    return any(isinstance(inner, ast.Call) and holds(inner, line) for inner in ast.walk(node))
