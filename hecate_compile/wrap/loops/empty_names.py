"""Which names have nothing in them in a turn without rows: masks, numbers of rows, what was picked by them."""

from __future__ import annotations

import ast
import itertools

from hecate.wrap.loops.spellings import (
    VIEWS,
    Guard,
    given_to,
    is_load,
    is_method,
    names_assigned,
    searched_by,
    sum_of,
    text_of,
)

# Those whose result is as empty as that; a part of a mask may be empty where the whole is not.
_AS_EMPTY = VIEWS - {"narrow", "select"} | {"clone", "contiguous", "repeat"}


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
