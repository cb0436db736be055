"""Locate code that Dynamo left to Python, for messages: the line of the user, and the graph break that caused it."""

from __future__ import annotations

import ast
import linecache
import logging
import os
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from functools import lru_cache
from importlib.util import find_spec
from types import FrameType
from typing import TypeVar

from hecate.private import GRAPH_BREAK_LOGS

_STACK = re.compile(r'File "(.+?)", line (\d+), in ')
_NOT_OF_USERS = tuple(
    os.path.join(folder, "")
    for package in ("torch", "hecate", "hecate.passes", "hecate.runtime")
    for folder in getattr(find_spec(package), "submodule_search_locations", None) or ()
)

Place = tuple[str, int]
_Node = TypeVar("_Node", ast.FunctionDef, ast.ClassDef)


class _Breaks(logging.Handler):
    """Notices graph breaks in torch's log, which alone tells them, once for each line."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        # The place where the innermost code broke, by file and line of all code that was being traced.
        self.causes: dict[str, dict[int, Place]] = defaultdict(dict)

    def emit(self, record: logging.LogRecord) -> None:
        stack = [(file, int(line)) for file, line in _STACK.findall(record.getMessage())]
        for file, line in stack:
            self.causes[file][line] = next(filter(_is_of_user, reversed(stack)), stack[-1])

    def within(self, file: str, lines: Container[int | None]) -> Place | None:
        found = [cause for line, cause in self.causes[file].items() if line in lines]
        return found[-1] if found else None


_breaks = _Breaks()


def hear_graph_breaks() -> None:
    """Start to notice graph breaks, for :func:`python_around`. The user sees of torch's log what they saw before."""
    for name in GRAPH_BREAK_LOGS:
        log = logging.getLogger(name)
        if _breaks in log.handlers:
            continue
        if not log.isEnabledFor(logging.DEBUG):
            log.setLevel(logging.DEBUG)
            log.propagate = False
        log.addHandler(_breaks)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames around ``frame``, from the inside out, without torch's and Hecate's."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "hecate"):
            yield frame
        frame = frame.f_back


def places_around(frame: FrameType) -> list[Place]:
    """Return the user's lines that run around ``frame``, from the outside in."""
    return [(found.f_code.co_filename, found.f_lineno) for found in user_frames(frame)][::-1]


def places_in(trace: str) -> list[Place]:
    """Return the user's lines of a stack as torch prints it, from the outside in."""
    return list(filter(_is_of_user, ((file, int(line)) for file, line in _STACK.findall(trace))))


def python_around(frame: FrameType | None) -> str:
    """Return as text the user's line that runs as Python around ``frame``, and the graph break that caused it."""
    text: list[str] = []
    for found in user_frames(frame):
        if not text:
            text.append(f"  {shown(found.f_code.co_filename, found.f_lineno)}")
        code = found.f_code
        cause = _breaks.within(code.co_filename, {line for _, _, line in code.co_lines()})
        if cause is not None:
            text.append(f"Dynamo broke the graph here:\n  {shown(*cause)}")
            break
    return "\n".join(text)


def break_near(file: str, line: int) -> str:
    """Return the graph break in the function that has a line; "" if none was noticed."""
    function = innermost(file, line, ast.FunctionDef)
    lines = range(function.lineno, (function.end_lineno or line) + 1) if function is not None else range(0)
    cause = _breaks.within(file, lines)
    return shown(*cause) if cause is not None else ""


def innermost(file: str, line: int, kind: type[_Node]) -> _Node | None:
    """Return the innermost function or class that has a line; None if there is none."""
    nodes = (node for node in _nodes_of(file) if isinstance(node, kind))
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or line)]
    return max(around, key=lambda node: node.lineno, default=None)


@lru_cache(maxsize=64)
def _nodes_of(file: str) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def shown(file: str, line: int) -> str:
    """Return a line of code with its place, for messages."""
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def _is_of_user(place: Place) -> bool:
    return not place[0].startswith(_NOT_OF_USERS)


def called_by(package: str) -> bool:
    """Return whether code of ``package`` is on the stack above the caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False
