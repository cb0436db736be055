"""Prove that a turn without rows changes nothing."""

from __future__ import annotations

import ast

from hecate.wrap.loops.empty_names import Rows
from hecate.wrap.loops.experts_without_rows import keeps_rows
from hecate.wrap.loops.spellings import (
    CHANGES,
    REDUCES,
    LeftAlone,
    guard_of,
    is_comment,
    is_load,
    is_method,
    names_assigned,
    text_of,
)


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
