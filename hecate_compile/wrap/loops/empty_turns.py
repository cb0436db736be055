"""Prove that a turn without rows changes nothing, and that experts of a list do nothing without rows."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from hecate.private import BatchNormBase
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.loops.spellings import (
    LeftAlone,
    given_to,
    guard_of,
    is_comment,
    is_load,
    is_method,
    names_assigned,
    searched_by,
    text_of,
)

# Methods that change what they are called on, and those that have no value for a tensor without rows.
CHANGES = {"append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear", "add_module"}
REDUCES = {"mean", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "item", "tolist"}
REDUCES |= {"var", "std", "median", "quantile", "mode", "norm"}


class Rows:
    """Names that have nothing in them in a turn without rows: numbers of rows, and masks that are all False."""

    def __init__(self, mask: str | None, turn: str | None, depth: int) -> None:
        # Of a loop over hits: ``torch.where(mask[turn])`` finds rows, in each of the mask's ``depth`` further
        # dimensions.
        self.mask, self.turn, self.depth = mask, turn, depth
        self.turns = {turn} if turn is not None else set()
        self.numbers: set[str] = set()
        self.masks: set[str] = set()
        # For a loop with a guard, from the statements before it: names that one search gave, after the mask that it
        # searched; masks; and by the name of rows the name of the index that picked them.
        self._found: list[tuple[str | None, list[str]]] = []
        self._masks: set[str] = set()
        self._rows: dict[str, str] = {}

    def has(self, index: ast.expr) -> bool:
        """Return whether this index selects nothing in a turn without rows."""
        first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
        return isinstance(first, ast.Name) and first.id in self.numbers | self.masks

    def learn(self, node: ast.stmt) -> None:
        """Take note of what an assignment of one value tells about rows."""
        if isinstance(node, ast.With):
            for inner in node.body:
                self.learn(inner)
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return
        names, value = names_assigned(node), node.value
        # Whatever had the names before is gone.
        for known in (self.numbers, self.masks, self._masks):
            known.difference_update(names)
        self._found = [(source, those) for source, those in self._found if not {source, *those} & {*names}]
        self._rows = {rows: index for rows, index in self._rows.items() if not {rows, index} & {*names}}
        if isinstance(value, ast.Name) and value.id in self.turns:
            self.turns |= set(names)
        searched = searched_by(value)
        if searched is not None:
            source = searched.id if isinstance(searched, ast.Name) else None
            if source in self.masks or (self._is_of_turn(searched) and len(names) == self.depth):
                self.numbers |= set(names)
            self._found.append((source, names))
        elif len(names) == 1 and not isinstance(node.targets[0], ast.Tuple):
            if isinstance(value, ast.Compare) or (is_method(value) and value.func.attr == "any" and given_to(value)):
                self._masks |= set(names)
            if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Name):
                self._rows[names[0]] = value.slice.id

    def _is_of_turn(self, node: ast.expr) -> bool:
        if is_method(node) and node.func.attr == "squeeze" and given_to(node) == ["0"]:
            node = node.func.value
        return (
            isinstance(node, ast.Subscript) and text_of(node.value) == self.mask and text_of(node.slice) in self.turns
        )

    def starts_from(self, guard: str, mask: bool) -> bool:
        """Take the names that are empty when ``guard`` is; return False if that is not known to be of rows."""
        if mask:
            self.masks = {guard} & self._masks
            self.numbers = {name for source, names in self._found if source == guard and self.masks for name in names}
            return bool(self.masks)
        guard = self._rows.get(guard, guard)
        for source, names in self._found:
            if guard in names:
                self.numbers |= set(names)
                self.masks |= {source} & self._masks if source is not None else set()
        return guard in self.numbers


class Effects:
    """Checks that a turn has no effect but what it writes to its own rows, and is defined without any."""

    def __init__(self, outside: set[str], rows: Rows, body: list[ast.stmt], turn: set[str]) -> None:
        self.outside, self.rows, self.turn = outside, rows, turn
        self.later = {name for statement in body for n in ast.walk(statement) for name in names_assigned(n)}
        self.assigned: set[str] = set()
        # Names of tensors that a turn has made itself, and that are no views of others.
        self.own: set[str] = set()

    def check(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements without guards; raise :class:`LeftAlone` if one may do something without rows."""
        kept: list[ast.stmt] = []
        for node in body:
            guard = guard_of(node)
            if guard is not None:
                if guard.name not in (self.rows.masks if guard.mask else self.rows.numbers):
                    raise LeftAlone(f"{guard.name} may be empty where the turn has rows")
                kept += self.check(guard.body)
                continue
            self._statement(node)
            kept.append(node)
        return kept

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            loaded = {n.id for n in ast.walk(node.test) if is_load(n)}
            if loaded & (self.later - self.turn - self.rows.turns):
                raise LeftAlone(f"`if {text_of(node.test)}` depends on a turn's rows")
            before, after = self.own, []
            for branch in (node.body, node.orelse):
                self.own = before
                for inner in branch:
                    self._statement(inner)
                after.append(self.own)
            self.own = after[0] & after[1]
        elif isinstance(node, ast.With):
            for inner in node.body:
                self._statement(inner)
        elif isinstance(node, (ast.Continue, ast.Pass)) or is_comment(node) or self._writes_rows(node):
            return
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in self.own:
            self._value(node.value)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assignment(node)
        else:
            raise LeftAlone(f"{text_of(node)} may do something in a turn without rows")

    def _assignment(self, node: ast.Assign) -> None:
        self._value(node.value)
        carried = {n.id for n in ast.walk(node.value) if is_load(n)} & (self.later - self.assigned)
        names = set(names_assigned(node))
        if carried or not names or names & self.outside:
            raise LeftAlone(f"{text_of(node)} reaches beyond a turn")
        self.assigned |= names
        self.own = (self.own | names) if isinstance(node.value, ast.BinOp) else self.own - names
        self.rows.learn(node)

    def _writes_rows(self, node: ast.stmt) -> bool:
        """Recognize ``out.index_add_(0, rows, y)``, ``out = out.index_add(0, rows, y)``, ``out[rows] (+)= y``."""
        if isinstance(node, ast.Expr) and self._adds_rows(node.value, "index_add_"):
            return True
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and self._adds_rows(node.value, "index_add"):
                assert is_method(node.value)
                return text_of(node.value.func.value) == target.id
        elif isinstance(node, ast.AugAssign):
            target = node.target
        else:
            return False
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        if not self.rows.has(target.slice):
            return False
        self._value(node.value)
        return True

    def _adds_rows(self, node: ast.expr, method: str) -> bool:
        if not (is_method(node) and node.func.attr == method and isinstance(node.func.value, ast.Name)):
            return False
        if node.func.value.id in self.later and method == "index_add_" and node.func.value.id not in self.outside:
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if len(given) < 3 or text_of(given[0]) != "0" or not self.rows.has(given[1]):
            return False
        self._value(given[2])
        return True

    def _value(self, value: ast.expr) -> None:
        """Raise :class:`LeftAlone` for a value that changes something, or is not defined without rows."""
        for node in ast.walk(value):
            if isinstance(node, (ast.NamedExpr, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)):
                raise LeftAlone(f"{text_of(node)} may do something in a turn without rows")
            base = node.value if isinstance(node, ast.Subscript) else None
            picked = isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.UnaryOp))
            if picked and isinstance(base, ast.Name) and base.id in self.later:
                raise LeftAlone(f"{text_of(node)} is not there in a turn without rows")
            if not is_method(node):
                continue
            name, given = node.func.attr, given_to(node)
            if (name.endswith("_") and not name.endswith("__")) or name in CHANGES:
                raise LeftAlone(f"{text_of(node)} may do something in a turn without rows")
            if name in REDUCES and not keeps_rows(node):
                raise LeftAlone(f"{text_of(node)} is not defined without rows")
            if name in ("reshape", "view") and "-1" in given[1:]:
                raise LeftAlone(f"{text_of(node)} is not defined without rows")


def keeps_rows(node: ast.Call) -> bool:
    """Return whether a call reduces other dimensions than the first, or is an element-wise maximum or minimum."""
    assert isinstance(node.func, ast.Attribute)
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    given = [*node.args, *(options[name] for name in ("dim", "axis") if name in options)]
    for value in given:
        try:
            dims = ast.literal_eval(value)
        except ValueError:
            continue
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        if all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims) and 0 not in dims:
            return True
    operands = len(node.args) + (text_of(node.func.value) not in ("torch", "F"))
    numbers = any(isinstance(value, (ast.Constant, ast.UnaryOp)) for value in node.args)
    return node.func.attr in ("max", "min") and ((operands == 2 and not numbers) or "other" in options)


# Methods whose result shares the memory of the tensor that they are called on.
_VIEWS = {"detach", "expand", "flatten", "narrow", "permute", "reshape", "select", "squeeze", "unsqueeze", "view"}
_VIEWS |= {"t", "transpose"}


def minds_no_rows(experts: ExpertsModule) -> str | None:
    """Return what an expert of a list does although it has no rows, and where; None if nothing is seen."""
    done: set[type] = set()
    for member in experts.members:
        for module in member.modules():
            if isinstance(module, BatchNormBase) and module.track_running_stats:
                return f"{type(module).__name__}, whose statistics are of the rows that it is given"
            cls = type(module)
            if cls in done or cls.__module__.partition(".")[0] == "torch":
                continue
            done.add(cls)
            found = next(_found_in(cls), None)
            if found is not None:
                return found
    return None


def _found_in(cls: type) -> Iterator[str]:
    todo, seen = ["forward"], set()
    while todo:
        name = todo.pop()
        function: Any = getattr(cls, name, None)
        function = function if function is None else inspect.unwrap(function)
        if name in seen or not inspect.isfunction(function) or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(name)
        try:
            lines, start = inspect.getsourcelines(function)
            definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue
        if not isinstance(definition, ast.FunctionDef):
            continue
        ast.increment_lineno(definition, start - 1)
        for node in _Reader(definition).find():
            yield f"`{text_of(node)}` in {function.__code__.co_filename}:{node.lineno}"
        calls = (n for n in ast.walk(definition) if is_method(n) and text_of(n.func.value) == "self")
        todo += [call.func.attr for call in calls]


class _Reader:
    """Finds statements whose effect outlives a call, and expressions that are not defined without rows."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.definition = definition
        given = definition.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        self.receiver = arguments[0].arg if arguments else ""
        # Names that the rows may be in: what else is reduced, such as a weight, is there without rows, too.
        self.rows = {argument.arg for argument in arguments[1:]}
        self.local = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and not is_load(n)} | self.rows

    def find(self) -> Iterator[ast.stmt | ast.expr]:
        nodes = [n for n in ast.walk(self.definition) if isinstance(n, (ast.stmt, ast.expr))]
        self._follow_rows(nodes)
        for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
                if any(not isinstance(one, ast.Name) and not self._is_local(one) for one in flat):
                    yield node
            elif is_method(node):
                name = node.func.attr
                changes = (name.endswith("_") and not name.endswith("__")) or name in CHANGES
                reduces = name in REDUCES and not keeps_rows(node)
                outlives = changes and not (self._is_local(node.func.value) or self._is_function(node))
                if outlives or (reduces and any(map(self._loads_rows, (node.func.value, *node.args[:1])))):
                    yield node

    def _follow_rows(self, nodes: list[ast.stmt | ast.expr]) -> None:
        before = -1
        while len(self.rows) != before:
            before = len(self.rows)
            for node in nodes:
                if isinstance(node, (ast.Assign, ast.AugAssign)) and self._loads_rows(node.value):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    stored = (n for target in targets for n in ast.walk(target))
                    self.rows |= {n.id for n in stored if isinstance(n, ast.Name) and not is_load(n)}

    def _loads_rows(self, node: ast.AST) -> bool:
        return any(is_load(n) and n.id in self.rows for n in ast.walk(node))

    def _is_local(self, node: ast.expr) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)) or (is_method(node) and node.func.attr in _VIEWS):
            node = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else node.func.value
        if isinstance(node, ast.Name):
            return node.id != self.receiver and node.id in self.local
        return True

    def _is_function(self, node: ast.Call) -> bool:
        assert isinstance(node.func, ast.Attribute)
        first = node.args[0] if node.args else None
        of_module = text_of(node.func.value).split(".")[0] in ("torch", "F", "nn")
        return of_module and first is not None and self._is_local(first)
