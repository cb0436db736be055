"""Find the names in a function whose values come from data, and so may differ between ranks, by its syntax tree.

Values computed from tensors may differ, and so may sizes; numbers of experts and options are the same on all ranks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hecate.private import buffers_of, children_of, parameters_of

# Attributes and methods of a tensor, and functions of any value, whose results are the same on all ranks.
_SAME = {"dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"}
_SAME_METHODS = {"dim", "is_floating_point", "is_complex"}
_SAME_FUNCTIONS = {"isinstance", "hasattr", "callable", "type"}
_FILLS = {"append", "appendleft", "extend", "insert", "add", "update"}
_OF_A_RANK = re.compile(r"\brand|random\b|\bget_rank\b")
_UNKNOWN = object()

_Assignment = tuple[ast.AST, ast.expr]


class DataNames:
    """Names, and attributes such as ``self.count``, that come from data where a line of a function runs.

    Order does not matter: a name comes from data if any assignment gives it such a value. ``values`` are known values
    of names in the line; ``assumed``, arguments of which nothing is known, may come from data.
    """

    def __init__(
        self, function: ast.FunctionDef, line: int, values: Mapping[str, Any], names: set[str], assumed: set[str]
    ) -> None:
        self.names, self._assumed, self._values = names | assumed, assumed, values
        # Names of which data decide whether they are None.
        self._chosen: set[str] = set()
        nodes = list(ast.walk(function))
        known = -1
        while known != len(self.names) + len(self._chosen):
            known = len(self.names) + len(self._chosen)
            for node in nodes:
                for target, value in _assignments(node):
                    self._bind(target, value)
                # A branch around the line is the same for all code in it.
                if isinstance(node, (ast.If, ast.While)) and not holds(node, line) and self.reads(node.test):
                    for target in (target for inner in ast.walk(node) for target, _ in _assignments(inner)):
                        self.names.update(_written(target))
                        self._chosen.update(_written(target))

    def reads(self, node: ast.AST) -> bool:
        """Return whether an expression reads a value that comes from data."""
        match node:
            case ast.Name(id=name):
                return name in self.names or _has_tensor(self._values.get(name))
            case ast.Attribute(attr=attribute, value=owner):
                if ast.unparse(node) in self.names:
                    return True
                value = self.value(node)
                return attribute not in _SAME and (self.reads(owner) if value is _UNKNOWN else _has_tensor(value))
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=index) if ast.unparse(index) == "-1":
                return False
            case ast.Call(func=ast.Attribute(attr="size"), args=[index]) if ast.unparse(index) == "-1":
                return False
            case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(attr="shape")]):
                return False
            case ast.Call(func=ast.Attribute(attr=name)) if name in _SAME_METHODS:
                return False
            case ast.Call(func=ast.Name(id=name)) if name in _SAME_FUNCTIONS:
                return False
            case ast.Call(func=function) if _OF_A_RANK.search(ast.unparse(function)):
                return True
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                if isinstance(left, ast.Name):
                    return left.id in self._chosen
                return ast.unparse(left) in self.names if isinstance(left, ast.Attribute) else self.reads(left)
        return any(map(self.reads, ast.iter_child_nodes(node)))

    def picks(self, call: ast.Call) -> bool:
        """Return whether data decide which module a call calls, or passes as an argument."""
        if isinstance(call.func, ast.Name) and call.func.id not in self._assumed and self.reads(call.func):
            return True
        if isinstance(call.func, (ast.Subscript, ast.Call)) and self.reads(call.func):
            return True
        indexed = (node for node in ast.walk(call) if isinstance(node, ast.Subscript) and self.reads(node.slice))
        return any(isinstance(self.value(node.value), nn.Module) for node in indexed)

    def value(self, node: ast.AST) -> Any:
        """Return the value of a chain of attributes, any one for an element; ``_UNKNOWN`` if it is not known."""
        match node:
            case ast.Name(id=name):
                return self._values.get(name, _UNKNOWN)
            case ast.Attribute(value=inner, attr=attribute):
                owner = self.value(inner)
                stores = [getattr(owner, "__dict__", {})] if not isinstance(owner, Tensor) else []
                if isinstance(owner, nn.Module):
                    stores += [buffers_of(owner), parameters_of(owner), children_of(owner)]
                return next((store[attribute] for store in stores if attribute in store), _UNKNOWN)
            case ast.Subscript(value=inner):
                owner = self.value(inner)
                owner = list(owner.values()) if isinstance(owner, (dict, nn.ModuleDict)) else owner
                return next(iter(owner), _UNKNOWN) if isinstance(owner, (list, tuple, nn.ModuleList)) else _UNKNOWN
        return _UNKNOWN

    def _bind(self, target: ast.AST, value: ast.expr) -> None:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
        match value:
            case ast.Call(func=ast.Name(id="enumerate"), args=[over, *_]) if len(parts) == 2:
                self._bind(parts[1], over)
            case ast.Call(func=ast.Name(id="zip"), args=values) | ast.Tuple(elts=values) if len(parts) == len(values):
                for part, one in zip(parts, values, strict=True):
                    self._bind(part, one)
            case _ if self.reads(value):
                self.names.update(_written(target))
                by_data = isinstance(value, ast.IfExp) and self.reads(value.test)
                if by_data or isinstance(value, (ast.Call, ast.BoolOp)):
                    self._chosen.update(_written(target))


def holds(node: ast.AST, line: int) -> bool:
    """Return whether a line is one of a node's."""
    first, last = getattr(node, "lineno", line + 1), getattr(node, "end_lineno", line)
    return bool(first <= line <= last)


def _assignments(node: ast.AST) -> list[_Assignment]:
    """Return the targets and values of assignments that a node makes itself, without the nodes in it."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return [(target, value) for target in targets]
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            return [(target, value)]
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            return [(target, value)]
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            return [(target, value)]
        case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
            return [(target, value)]
        case ast.Match(subject=value, cases=cases):
            patterns = (pattern for case in cases for pattern in ast.walk(case.pattern))
            return [(pattern, value) for pattern in patterns if isinstance(pattern, (ast.MatchAs, ast.MatchStar))]
        case ast.Call(func=ast.Attribute(value=target, attr=name), args=values) if name in _FILLS:
            return [(target, value) for value in values]
    return []


def _written(target: ast.AST) -> Iterator[str]:
    """Yield the names and attributes that an assignment writes to; for an element, its container."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _written(part)
        case ast.Starred(value=inner) | ast.Subscript(value=inner):
            yield from _written(inner)
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.Name() | ast.Attribute():
            yield ast.unparse(target)


def _has_tensor(value: Any, depth: int = 3) -> bool:
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple, set)):
        # A container may have itself in it.
        return depth > 0 and any(_has_tensor(one, depth - 1) for one in values)
    return hasattr(type(value), "__array__")
