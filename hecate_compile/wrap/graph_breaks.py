"""Code that Dynamo left to Python, for messages: the user's line that runs, and the graph break because of which.

Torch tells where it breaks a graph in its log alone, and there once for each line.
"""

from __future__ import annotations

import ast
import linecache
import logging
import re
from collections import defaultdict
from collections.abc import Container, Iterator
from functools import lru_cache
from types import FrameType

from hecate.private import GRAPH_BREAK_LOGS

_STACK = re.compile(r'File "(.+?)", line (\d+), in ')

Place = tuple[str, int]


class _Breaks(logging.Handler):
    """Hears of graph breaks.

    Attributes:
        causes: by file and line of all code that was being traced, where the innermost of it broke.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.causes: dict[str, dict[int, Place]] = defaultdict(dict)

    def emit(self, record: logging.LogRecord) -> None:
        stack = [(file, int(line)) for file, line in _STACK.findall(record.getMessage())]
        for file, line in stack:
            self.causes[file][line] = next(filter(_is_of_user, reversed(stack)), stack[-1])

    def within(self, file: str, lines: Container[int | None]) -> Place | None:
        """The last one heard in a function."""
        found = [cause for line, cause in self.causes[file].items() if line in lines]
        return found[-1] if found else None


_breaks = _Breaks()


def hear_graph_breaks() -> None:
    """From now on :func:`python_around` knows of them. What the user sees of torch's log stays as it is."""
    for name in GRAPH_BREAK_LOGS:
        log = logging.getLogger(name)
        if _breaks in log.handlers:
            continue
        if not log.isEnabledFor(logging.DEBUG):
            log.setLevel(logging.DEBUG)
            log.propagate = False
        log.addHandler(_breaks)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """What runs around ``frame``, from the inside out, without torch and Hecate."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "hecate"):
            yield frame
        frame = frame.f_back


def python_around(frame: FrameType | None) -> str:
    """The user's line that runs as Python around ``frame``, and the graph break because of which; lines of text."""
    text: list[str] = []
    for found in user_frames(frame):
        if not text:
            text.append(f"  {_shown(found.f_code.co_filename, found.f_lineno)}")
        code = found.f_code
        cause = _breaks.within(code.co_filename, {line for _, _, line in code.co_lines()})
        if cause is not None:
            text.append(f"Dynamo broke the graph here:\n  {_shown(*cause)}")
            break
    return "\n".join(text)


def break_near(file: str, line: int) -> str:
    """The graph break in the function that has a line; "" if none was heard."""
    functions = [node for node in nodes_of(file) if isinstance(node, ast.FunctionDef)]
    around = [range(node.lineno, (node.end_lineno or line) + 1) for node in functions]
    innermost = min((lines for lines in around if line in lines), key=len, default=range(0))
    cause = _breaks.within(file, innermost)
    return _shown(*cause) if cause is not None else ""


@lru_cache(maxsize=64)
def nodes_of(file: str) -> tuple[ast.AST, ...]:
    """The syntax tree of a file, flat; nothing of what has no source."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def _shown(file: str, line: int) -> str:
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def _is_of_user(place: Place) -> bool:
    return "/torch/" not in place[0].replace("\\", "/")
