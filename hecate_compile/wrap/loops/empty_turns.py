"""Prove that a turn without rows changes nothing, and that experts of a list do nothing without rows."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

from hecate.private import BatchNormBase
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.loops.spellings import (
    Guard,
    LeftAlone,
    given_to,
    guard_of,
    is_comment,
    is_load,
    is_method,
    names_assigned,
    searched_by,
    sum_of,
    text_of,
)

# Methods that change what they are called on, and those that have no value for a tensor without rows.
CHANGES = {"append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear", "add_module"}
REDUCES = {"mean", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "item", "tolist"}
REDUCES |= {"var", "std", "median", "quantile", "mode", "norm"}

# Methods whose result shares the memory of the tensor that they are called on.
_VIEWS = {"detach", "expand", "flatten", "narrow", "permute", "reshape", "select", "squeeze", "unsqueeze", "view"}
_VIEWS |= {"t", "transpose"}

# Those whose result is as empty as that; a part of a mask may be empty where the whole is not.
_AS_EMPTY = _VIEWS - {"narrow", "select"} | {"clone", "contiguous", "repeat"}
# Kinds of values: masks of booleans, numbers of rows, what was picked by either, and what rows were searched in.
_MASK, _NUMBERS, _PICKED, _SEARCHED = "mask", "numbers", "picked", "searched"
_ROWS = (_NUMBERS, _PICKED)


class Rows:
    """Names that have nothing in them in a turn without rows: numbers of rows, and masks that are all False.

    Each is as empty as what it was computed from: numbers as the mask that was searched for them, a view as what it
    is a view of, and ``x[index]`` as the index.
    """

    def __init__(self, mask: str | None, turn: str | None, depth: int) -> None:
        # Of a loop over hits: ``torch.where(mask[turn])`` finds rows, in each of the mask's ``depth`` further
        # dimensions.
        self.mask, self.turn, self.depth = mask, turn, depth
        self.turns = {turn} if turn is not None else set()
        # By name: a number that names have which are empty together, and what kind of value it is.
        self._known: dict[str, tuple[int, str]] = {}
        self._groups = itertools.count()
        # Numbers of rows by name, and pairs of bounds that are so far apart.
        self._numbers: dict[str, int] = {}
        self._bounds: dict[frozenset[str], int] = {}
        # The loop's guard leaves out turns whose number is below 0, too.
        self._negative = False
        self._empty: set[int] = set()

    def has(self, index: ast.expr) -> bool:
        """Return whether this index selects nothing in a turn without rows."""
        first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
        if isinstance(first, ast.Slice):
            return self._between(first) in self._empty
        group, kind = self._as_empty_as(first) or (-1, "")
        return group in self._empty and kind in (_MASK, *_ROWS)

    def is_unchanged(self, node: ast.stmt) -> bool:
        """Return whether a statement gives a bound the value that it has, in a turn without rows."""
        names = names_assigned(node)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and is_load(node.value):
            return len(names) == 1 and self._numbers.get(node.value.id, -1) in self._empty
        if not isinstance(node, ast.Assign) or len(names) != 1:
            return False
        known = sum_of(node.value)
        if known is not None:
            return known[0] == names[0] and self._numbers.get(known[1], -1) in self._empty
        return is_load(node.value) and self._bounds.get(frozenset((*names, node.value.id)), -1) in self._empty

    def learn(self, node: ast.stmt) -> None:
        """Take note of what an assignment of one value tells about rows."""
        if isinstance(node, ast.With):
            for inner in node.body:
                self.learn(inner)
            return
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            self._forget(node)
            return
        names, value, known = names_assigned(node), node.value, None
        searched = searched_by(value)
        if searched is not None:
            known = (self._searched(searched, len(names)), _NUMBERS)
        elif len(names) == 1 and not isinstance(node.targets[0], ast.Tuple):
            known = self._as_empty_as(value)
        self._forget(node)
        if known is not None:
            self._known |= dict.fromkeys(names, known)
        added = sum_of(value)
        if added is not None and len(names) == 1 and names[0] not in added:
            self._bounds[frozenset((names[0], added[0]))] = self._number(added[1])
        if isinstance(value, ast.Name) and value.id in self.turns:
            self.turns |= set(names)

    def _forget(self, node: ast.stmt) -> None:
        """Forget names that a statement gives other values, and what shares memory with a value that it changes."""
        for inner in ast.walk(node):
            changed: ast.AST = ast.Pass()
            if isinstance(inner, ast.Name) and not is_load(inner):
                self._known.pop(inner.id, None)
                self._forget_number(inner.id)
            elif isinstance(inner, ast.AugAssign):
                changed = inner.target
            elif isinstance(inner, (ast.Subscript, ast.Attribute)) and not isinstance(inner.ctx, ast.Load):
                changed = inner
            elif is_method(inner) and inner.func.attr.endswith("_"):
                changed = inner.func.value
            while isinstance(changed, (ast.Subscript, ast.Attribute, ast.Call)):
                changed = changed.func if isinstance(changed, ast.Call) else changed.value
            if isinstance(changed, ast.Name):
                self._forget_number(changed.id)
            if isinstance(changed, ast.Name) and changed.id in self._known:
                gone, _ = self._known[changed.id]
                self._known = {name: known for name, known in self._known.items() if known[0] != gone}

    def _forget_number(self, name: str) -> None:
        self._numbers.pop(name, None)
        self._bounds = {pair: group for pair, group in self._bounds.items() if name not in pair}

    def _searched(self, mask: ast.expr, found: int) -> int:
        """Return the group of numbers that a search of ``mask`` finds."""
        group = next(self._groups)
        if isinstance(mask, ast.Name):
            # It may be one of numbers, by which rows may not be picked. In numbers zeros are not found.
            known, kind = self._known.setdefault(mask.id, (group, _SEARCHED))
            group = known if kind in (_MASK, _SEARCHED) else group
        elif self._is_of_turn(mask) and found == self.depth:
            self._empty.add(group)
        return group

    def _as_empty_as(self, value: ast.expr) -> tuple[int, str] | None:
        """Return the group of a value and its kind; None if it is neither a mask nor rows."""
        if isinstance(value, ast.Name):
            return self._known.get(value.id)
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice):
            group = self._between(value.slice)
            return (group, _PICKED) if group is not None else None
        if isinstance(value, ast.Compare):
            return next(self._groups), _MASK
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Name):
            group, kind = self._known.get(value.slice.id, (-1, ""))
            # What was picked may be booleans, which pick some of their rows again.
            return (group, _PICKED) if kind in (_MASK, _NUMBERS) else None
        if is_method(value) and value.func.attr == "any" and given_to(value):
            inner = self._as_empty_as(value.func.value)
            return inner if inner is not None and inner[1] == _MASK else (next(self._groups), _MASK)
        if is_method(value) and value.func.attr in _AS_EMPTY:
            return self._as_empty_as(value.func.value)
        return None

    def _is_of_turn(self, node: ast.expr) -> bool:
        if is_method(node) and node.func.attr == "squeeze" and given_to(node) == ["0"]:
            node = node.func.value
        return (
            isinstance(node, ast.Subscript) and text_of(node.value) == self.mask and text_of(node.slice) in self.turns
        )

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, next(self._groups))

    def _between(self, rows: ast.Slice) -> int | None:
        """Return the group of what is between two bounds, ``start:end`` or ``start:start + number``."""
        if rows.step is not None or rows.lower is None or rows.upper is None or not is_load(rows.lower):
            return None
        if is_load(rows.upper):
            return self._bounds.setdefault(frozenset((rows.lower.id, rows.upper.id)), next(self._groups))
        added = sum_of(rows.upper)
        return self._number(added[1]) if added is not None and added[0] == rows.lower.id else None

    def starts_from(self, guard: Guard) -> bool:
        """Take the names that are empty where a guard says so; return False if that is not known to be of rows."""
        self._empty = {group} if (group := self._group_of(guard)) is not None else set()
        self._negative = guard.negative
        return bool(self._empty)

    def is_number(self, node: ast.AST) -> bool:
        """Return whether a node is the number of rows, which is 0 in a turn without any."""
        return is_load(node) and self._numbers.get(node.id, -1) in self._empty

    def answers(self, guard: Guard) -> bool:
        """Return whether a guard asks what another one has asked."""
        return self._group_of(guard) in self._empty and (self._negative or not guard.negative)

    def _group_of(self, guard: Guard) -> int | None:
        if guard.kind == "number":
            return self._number(guard.name)
        if guard.kind == "bounds":
            return self._bounds.setdefault(frozenset((guard.name, guard.other)), next(self._groups))
        group, kind = self._known.get(guard.name, (-1, ""))
        return group if kind in ((_MASK,) if guard.kind == "mask" else _ROWS) else None


class Effects:
    """Checks that a turn has no effect but what it writes to its own rows, and is defined without any."""

    def __init__(self, outside: set[str], rows: Rows, body: list[ast.stmt], turn: set[str]) -> None:
        self.outside, self.rows, self.turn = outside, rows, turn
        nodes = [n for statement in body for n in ast.walk(statement)]
        self.later = {name for n in nodes for name in names_assigned(n)}
        ends = [end for n in nodes if isinstance(n, ast.Slice) for end in (n.lower, n.upper) if end is not None]
        self.bounds = {end.id for end in ends if is_load(end)}
        self.assigned: set[str] = set()
        # Names of tensors that a turn has made itself, and that are no views of others.
        self.own: set[str] = set()

    def check(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements without guards; raise :class:`LeftAlone` if one may do something without rows."""
        kept: list[ast.stmt] = []
        for node in body:
            guard = guard_of(node)
            asks = guard is not None and self.rows.answers(guard)
            if guard is not None and (asks or guard.kind in ("rows", "mask")):
                if not asks:
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
        elif self.rows.is_unchanged(node):
            self.rows.learn(node)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in self.own:
            self._value(node.value)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assignment(node)
        else:
            raise LeftAlone(f"{text_of(node)} may do something in a turn without rows")

    def _assignment(self, node: ast.Assign) -> None:
        self._value(node.value)
        carried = {n.id for n in ast.walk(node.value) if is_load(n)} & (self.later - self.assigned)
        # What is outside may only be given the value that it has.
        carried -= self.bounds & self.outside
        names = set(names_assigned(node))
        if carried or not names or names & self.outside:
            raise LeftAlone(f"{text_of(node)} reaches beyond a turn")
        self.assigned |= names
        self.own = (self.own | names) if isinstance(node.value, ast.BinOp) else self.own - names
        self.rows.learn(node)

    def _writes_rows(self, node: ast.stmt) -> bool:
        """Recognize ``out.index_add_(0, rows, y)``, ``out = out.index_add(0, rows, y)``, ``out[rows] (+)= y``.

        ``scatter_add_`` adds elements, none where its index is empty.
        """
        if isinstance(node, ast.Expr) and self._adds_rows(node.value, "index_add_", "scatter_add_"):
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

    def _adds_rows(self, node: ast.expr, *methods: str) -> bool:
        if not (is_method(node) and node.func.attr in methods and isinstance(node.func.value, ast.Name)):
            return False
        name, changes = node.func.value.id, node.func.attr.endswith("_")
        if name in self.later and changes and name not in self.outside:
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
            number = node.slice if isinstance(node, ast.Subscript) else None
            if number is not None and is_load(number) and number.id in self.bounds:
                raise LeftAlone(f"{text_of(node)} is not there in a turn without rows")
            divided = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod))
            if isinstance(node, ast.BinOp) and divided and any(map(self.rows.is_number, ast.walk(node.right))):
                raise LeftAlone(f"{text_of(node)} is not defined without rows")
            if isinstance(node, ast.Call) and text_of(node.func) == "next":
                raise LeftAlone(f"{text_of(node)} may do something in a turn without rows")
            picked = isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.UnaryOp))
            if picked and isinstance(base, ast.Name) and base.id in self.later:
                raise LeftAlone(f"{text_of(node)} is not there in a turn without rows")
            if not is_method(node):
                continue
            name = node.func.attr
            if (name.endswith("_") and not name.endswith("__")) or name in CHANGES:
                raise LeftAlone(f"{text_of(node)} may do something in a turn without rows")
            if (name in REDUCES and not keeps_rows(node)) or name in ("narrow", "select", "chunk"):
                raise LeftAlone(f"{text_of(node)} is not defined without rows")
            sizes = [text_of(n) for one in node.args for n in ([*one.elts] if isinstance(one, ast.Tuple) else [one])]
            if name in ("reshape", "view") and "-1" in sizes[1:]:
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
