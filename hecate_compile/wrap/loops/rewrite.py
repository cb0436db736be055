"""Change the loops of a model's experts, in the methods that have them."""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import logging
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from hecate.private import children_of
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.loops.experts_without_rows import minds_no_rows
from hecate.wrap.loops.row_lists import Counts, RowLists
from hecate.wrap.loops.turns import Loops
from hecate.wrap.swapped_class import swap_class

log = logging.getLogger("hecate")

# The attribute of a class whose methods have changed loops: these methods as they were written.
AS_WRITTEN = "_hecate_as_written"


@dataclass(frozen=True)
class _Rewritten:
    """A changed function: the lines that changed, the first of a loop that left experts out, and a unified diff."""

    function: FunctionType
    lines: list[int]
    loop: int | None
    diff: list[str]


@dataclass(frozen=True, kw_only=True)
class ChangedLoops:
    """Loops in model code that were changed.

    ``places`` are lines, as ``file:line``, and ``diff`` those of a unified diff. ``left_out`` are names of experts
    modules whose code does not call an expert that has no rows, and so gives it no gradient.
    """

    places: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


def make_loops_traceable(model: nn.Module, found: Sequence[ExpertsModule]) -> ChangedLoops:
    """Change loops over experts in the methods of experts modules and of the modules that they are in.

    A loop that has to leave experts out stays as it is; nothing can trace it (see ``whole_layers``).
    """
    near: dict[str, list[ExpertsModule]] = {}
    for experts in found:
        for name in dict.fromkeys((experts.name, experts.name.rpartition(".")[0])):
            near.setdefault(name, []).append(experts)
    done: dict[Any, _Rewritten | None] = {}
    places: dict[str, None] = {}
    left_out: set[str] = set()
    diffs: dict[FunctionType, list[str]] = {}
    for name, module in list(model.named_modules()):
        if name not in near:
            continue
        changed: dict[str, Any] = {}
        for key, function in _methods(module):
            listed = isinstance(children_of(module).get("experts"), (nn.ModuleList, nn.ModuleDict))
            folded = {key: e.num_experts for e in near[name] if e.folded for key in e.parameters}
            case = (function, listed, *folded.items())
            if case not in done:
                try:
                    done[case] = _rewritten(function, listed, folded)
                except Exception:
                    # Unchanged code is traced like any other, or named when that fails.
                    log.warning("hecate: could not look at the loops of %s", function.__qualname__, exc_info=True)
                    done[case] = None
            rewritten = done[case]
            if rewritten is not None:
                file = inspect.unwrap(function).__code__.co_filename
                if rewritten.loop is not None and _mind(near[name], f"{file}:{rewritten.loop}"):
                    continue
                if rewritten.loop is not None:
                    left_out |= {experts.name for experts in near[name]}
                changed[key] = rewritten.function
                diffs[function] = rewritten.diff
                places |= dict.fromkeys(f"{file}:{line}" for line in rewritten.lines)
        if changed:
            swap_class(module, changed | {AS_WRITTEN: {key: getattr(type(module), key) for key in changed}})
    lines = tuple(line for diff in diffs.values() for line in diff)
    return ChangedLoops(places=tuple(places), diff=lines, left_out=frozenset(left_out))


def _mind(near: Sequence[ExpertsModule], loop: str) -> bool:
    """Return whether a loop stays unchanged, because its experts would do something in a turn without rows."""
    for experts in near:
        does = minds_no_rows(experts)
        if does is not None:
            log.debug("loop at %s left alone: with no rows an expert of %s does %s", loop, experts.name, does)
            return True
    return False


def _methods(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    seen: set[str] = set()
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] == "torch":
            return
        for key, value in vars(cls).items():
            if isinstance(value, FunctionType) and key not in seen:
                yield key, value
            seen.add(key)


def _rewritten(function: FunctionType, listed: bool, folded: dict[str, int]) -> _Rewritten | None:
    """Return the function with its loops changed; None if there are none.

    ``listed``: ``self.experts`` is a list. ``folded``: numbers of experts, by names of folded parameters.
    """
    inner = vars(function).get("__wrapped__")
    if isinstance(inner, FunctionType):
        found = _rewritten(inner, listed, folded)
        again = None if found is None else wrapped_again(function, inner, found.function)
        return None if found is None or again is None else replace(found, function=again)
    try:
        source, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, start - 1)
    before = ast.unparse(definition).splitlines()
    loops = Loops(definition, listed, folded)
    lists = RowLists(definition)
    definition = loops.visit(lists.visit(definition))
    loop = min(loops.lines, default=None)
    loops.lines += lists.lines
    definition = Counts(loops.lines).visit(definition)
    if not loops.lines or has_private_names(definition) or not _finds(loops.uses, function):
        return None
    file = function.__code__.co_filename
    name = f"{file}:{function.__qualname__}"
    diff = difflib.unified_diff(before, ast.unparse(definition).splitlines(), name, f"{name}, traced", lineterm="")
    return _Rewritten(compiled(definition, function), loops.lines, loop, list(diff))


def _finds(names: set[str], function: FunctionType) -> bool:
    """Return whether names of torch and of Python mean these to a function."""
    code = function.__code__
    own, known = {*code.co_varnames, *code.co_freevars}, vars(builtins) | function.__globals__
    return own.isdisjoint(names) and all(
        known.get(name) is (torch if name == "torch" else vars(builtins)[name]) for name in names
    )


def wrapped_again(wrapper: FunctionType, old: FunctionType, new: FunctionType) -> FunctionType | None:
    """Return ``wrapper``, a decorated ``old``, around ``new``; None if it is unknown how the decorator keeps it."""
    cells = wrapper.__closure__ or ()
    if not any(cell.cell_contents is old for cell in cells):
        return None
    closure = tuple(CellType(new) if cell.cell_contents is old else cell for cell in cells)
    made = _function(wrapper, wrapper.__code__, closure)
    made.__dict__["__wrapped__"] = new
    return made


def has_private_names(definition: ast.FunctionDef) -> bool:
    """Return whether a definition has private names (``self.__x``), which mean something else outside of a class."""
    attributes = (node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute))
    return any(name.startswith("__") and not name.endswith("__") for name in attributes)


def compiled(definition: ast.FunctionDef, function: FunctionType) -> FunctionType:
    """Return the function of a changed definition, with the defaults, closure and attributes of ``function``."""
    # Names that it closes over, __class__ of super() among them, are arguments of a function around it.
    free = function.__code__.co_freevars
    tree = ast.parse(f"def around({', '.join(free)}): pass")
    around = tree.body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [definition]
    code = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec", dont_inherit=True)
    for name in ("around", definition.name):
        code = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    return _function(function, code, tuple(cells[name] for name in code.co_freevars))


def _function(like: FunctionType, code: Any, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__ = like.__kwdefaults__
    made.__qualname__, made.__module__, made.__doc__ = like.__qualname__, like.__module__, like.__doc__
    made.__annotations__ = dict(like.__annotations__)
    made.__dict__.update(like.__dict__)
    return made
