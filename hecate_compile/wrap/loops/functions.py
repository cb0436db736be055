"""Make functions from changed syntax trees, with all else that the functions had before."""

from __future__ import annotations

import ast
from types import CellType, FunctionType
from typing import Any


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
    """Return the function of a changed definition, with the closure and attributes of ``function``."""
    definition.decorator_list, definition.returns = [], None
    given = definition.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None
    # Only the number of defaults matters here: their values come from ``function``.
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [None if default is None else ast.Constant(None) for default in given.kw_defaults]
    # Names that it closes over, __class__ of super() among them, are arguments of a function around it.
    free = function.__code__.co_freevars
    around = ast.parse(f"def around({', '.join(free)}):\n    return {definition.name}")
    outer = around.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, definition)
    ast.fix_missing_locations(around)
    namespace: dict[str, Any] = {}
    exec(compile(around, function.__code__.co_filename, "exec", dont_inherit=True), namespace)
    code = namespace["around"](*(None for _ in free)).__code__
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    return _function(function, code, tuple(cells[name] for name in code.co_freevars))


def _function(like: FunctionType, code: Any, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__ = like.__kwdefaults__
    made.__qualname__, made.__module__, made.__doc__ = like.__qualname__, like.__module__, like.__doc__
    made.__annotations__ = dict(like.__annotations__)
    made.__dict__.update(like.__dict__)
    return made
