"""Turn loops that leave out experts without tokens into loops over all experts, and give counts a known length.

Rows are picked by tensors of numbers, not by lists of them.
"""

from __future__ import annotations

import ast
import copy
import logging
from collections.abc import Mapping, Sequence

from hecate.wrap.loops.empty_names import Rows
from hecate.wrap.loops.empty_turns import Effects
from hecate.wrap.loops.integers import Integers
from hecate.wrap.loops.spellings import (
    Guard,
    Hits,
    LeftAlone,
    chosen_end,
    expression,
    given_to,
    gives_a_value,
    guard_of,
    hits_of,
    is_load,
    is_method,
    names_assigned,
    sum_of,
    text_of,
)

log = logging.getLogger("hecate")


class Loops(ast.NodeTransformer):
    """Changes the loops of one function."""

    def __init__(self, definition: ast.FunctionDef, listed: bool, folded: Mapping[str, int]) -> None:
        self.definition, self.listed, self.folded = definition, listed, folded
        self.integers = Integers(definition)
        self.lines: list[int] = []
        # Names that what is written uses, of torch and of Python.
        self.uses: set[str] = set()

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        try:
            changed = self._over_hits(node) or self._with_guard(node)
        except LeftAlone as why:
            log.debug("loop in line %d of %s left alone: %s", node.lineno, self.definition.name, why)
            changed = None
        if changed is None:
            self.generic_visit(node)
            return node
        self.lines.append(node.lineno)
        return changed

    def _over_hits(self, node: ast.For) -> ast.For | list[ast.stmt] | None:
        """Turn a loop over a mask's experts that have tokens into one over all experts; None for another loop."""
        if not isinstance(node.target, ast.Name) or node.orelse:
            return None
        hits = self._hits(node)
        if hits is None:
            return None
        turn = node.target.id
        index = ExpertNumber(turn, hits.mask, hits.numbers, self.listed)
        body = [made for old in node.body for made in index.statement(copy.deepcopy(old))]
        rows = Rows(hits.mask, turn, hits.depth)
        body = self._checked(node, body, rows, {turn})
        turns = f"{hits.mask}.shape[0]"
        numbers = {turn, *(name for one in body for name in names_assigned(one) if _is_name(one, turn))}
        most = self._most(body, numbers)
        if most is not None:
            turns = f"min({turns}, {most})"
            self.uses |= {"min", "torch"}
        changed = ast.For(target=node.target, iter=expression(f"range({turns})"), body=body, orelse=[])
        ast.fix_missing_locations(ast.copy_location(changed, node))
        if most is None:
            return changed
        # One process raises, too, where a token has chosen such a number.
        others = f"torch._assert_async({hits.mask}[{most}:].any().logical_not(), 'a token has chosen no expert')"
        return [ast.copy_location(ast.Expr(expression(others)), node), changed]

    def _most(self, body: Sequence[ast.stmt], numbers: set[str]) -> int | None:
        """Return how many experts a folded parameter has of which every turn reads one, ``self.w.view(..)[e]``."""
        for one in body:
            nodes = list(ast.walk(one))
            if not isinstance(one, (ast.Assign, ast.With)) or any(isinstance(n, ast.IfExp) for n in nodes):
                return None
            for n in nodes:
                view = (
                    n.value if isinstance(n, ast.Subscript) and is_load(n.slice) and n.slice.id in numbers else None
                )
                if view is not None and is_method(view) and view.func.attr in ("view", "reshape", "unflatten"):
                    matrix = view.func.value
                    if isinstance(matrix, ast.Attribute) and matrix.attr in self.folded:
                        return self.folded[matrix.attr]
        return None

    def _hits(self, node: ast.For) -> Hits | None:
        if not isinstance(node.iter, ast.Name):
            return hits_of(node.iter)
        # A name that has this value and no other, and is used for nothing else.
        name = node.iter.id
        everything = list(ast.walk(self.definition))
        stores = [n for n in everything if isinstance(n, ast.Name) and n.id == name and not is_load(n)]
        loads = [n for n in everything if is_load(n) and n.id == name]
        made = [n for n in everything if isinstance(n, ast.Assign) and names_assigned(n) == [name]]
        given = [a for a in everything if isinstance(a, ast.arg) and a.arg == name]
        if len(stores) != 1 or len(loads) != 1 or len(made) != 1 or given or len(made[0].targets) != 1:
            return None
        hits = hits_of(made[0].value)
        if hits is None:
            return None
        later = [n for n in everything if getattr(n, "lineno", 0) > made[0].lineno]
        if any(gives_a_value(n, hits.mask) for n in later):
            raise LeftAlone(f"{hits.mask} changes between the hits and the loop")
        return hits

    def _with_guard(self, node: ast.For) -> ast.For | None:
        """Turn a loop that leaves out turns without rows into one that takes them; None for another loop."""
        rows = Rows(None, None, 0)
        for number, statement in enumerate(node.body):
            guard = guard_of(statement)
            if guard is None or (guard.kind in ("number", "bounds") and not self._asks_integers(guard)):
                rows.learn(statement)
                continue
            try:
                body = self._unguarded(node, number, guard, copy.deepcopy(rows))
            except LeftAlone as why:
                if guard.kind in ("rows", "mask"):
                    raise
                # Integers may be asked for anything; a later guard may ask for rows.
                log.debug("guard in line %d left alone: %s", statement.lineno, why)
                rows.learn(statement)
                continue
            changed = ast.For(
                target=node.target,
                iter=node.iter,
                body=[*node.body[:number], *body] or [ast.Pass()],
                orelse=node.orelse,
            )
            return ast.fix_missing_locations(ast.copy_location(changed, node))
        return None

    def _asks_integers(self, guard: Guard) -> bool:
        names = [guard.name, guard.other] if guard.kind == "bounds" else [guard.name]
        return all(self.integers.has(ast.Name(name, ast.Load())) for name in names)

    def _unguarded(self, node: ast.For, number: int, guard: Guard, rows: Rows) -> list[ast.stmt]:
        """Return what a turn does from its guard on, without it; raise :class:`LeftAlone` if that may be another."""
        turn = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        if not rows.starts_from(guard):
            raise LeftAlone(f"{guard.name} is not known to be of rows")
        guarded, behind = ([copy.deepcopy(n) for n in part] for part in (guard.body, node.body[number + 1 :]))
        if guard.kind == "number":
            # What stands behind ``if n: ...`` is of every turn.
            self._end_like_starts(guarded or behind, guard.name, [*guarded, *behind])
        if guard.negative and guarded and any(_loads(one, guard.name) for one in behind):
            raise LeftAlone(f"{guard.name} may be below 0 behind its guard")
        body = self._checked(node, [*guarded, *behind], rows, turn)
        return [self._not_negative(guard.name, node), *body] if guard.negative else body

    def _end_like_starts(self, body: Sequence[ast.stmt], number: str, turn: Sequence[ast.stmt]) -> None:
        """Write ends of a turn's rows, ``end = ends[e]``, so that they are the start where their ``number`` is 0."""
        slices = [n for one in turn for n in ast.walk(one) if isinstance(n, ast.Slice)]
        starts: dict[str, set[str]] = {}
        for rows in slices:
            if rows.lower is not None and rows.upper is not None and is_load(rows.lower) and is_load(rows.upper):
                starts.setdefault(rows.upper.id, set()).add(rows.lower.id)
        for one in body:
            target = one.targets[0] if isinstance(one, ast.Assign) and len(one.targets) == 1 else None
            own = starts.get(target.id, set()) if isinstance(target, ast.Name) else set()
            if len(own) != 1 or not isinstance(one, ast.Assign) or sum_of(one.value) is not None:
                continue
            if self.integers.has(one.value) and all(self.integers.has(ast.Name(start, ast.Load())) for start in own):
                one.value = ast.copy_location(chosen_end(number, one.value, *own), one.value)
                self.uses |= {"torch", "int"}

    def _not_negative(self, number: str, loop: ast.For) -> ast.stmt:
        """Write that a number below 0, which the guard has asked for, too, is none."""
        inside = {id(n) for n in ast.walk(loop)}
        if any(isinstance(n, ast.Name) and n.id == number and id(n) not in inside for n in ast.walk(self.definition)):
            raise LeftAlone(f"{number} is used elsewhere")
        self.uses.add("max")
        return ast.parse(f"{number} = max({number}, 0)").body[0]

    def _checked(self, node: ast.For, body: list[ast.stmt], rows: Rows, turn: set[str]) -> list[ast.stmt]:
        """Return ``body`` without guards; raise :class:`LeftAlone` if a turn without rows changes something."""
        inside = {id(n) for part in (*node.body, node.target) for n in ast.walk(part)}
        outside = {n.id for n in ast.walk(self.definition) if isinstance(n, ast.Name) and id(n) not in inside}
        if rows.turn in outside:
            raise LeftAlone("the loop's variable is used elsewhere")
        return Effects(outside, rows, body, turn).check(body)


def _loads(node: ast.AST, name: str) -> bool:
    return any(is_load(n) and n.id == name for n in ast.walk(node))


def _is_name(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement gives a value that has a name another name, too."""
    return isinstance(statement, ast.Assign) and is_load(statement.value) and statement.value.id == name


class ExpertNumber(ast.NodeTransformer):
    """Rewrites uses of the loop's variable, a tensor of one expert's number, as uses of the number itself."""

    def __init__(self, name: str, mask: str, is_number: bool, listed: bool) -> None:
        self.name, self.mask, self.is_number, self.listed = name, mask, is_number, listed
        self._known: set[int] = set()

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the statement, rewritten; nothing for ``expert = expert[0]``."""
        changed = self.visit(node)
        for inner in ast.walk(changed):
            if self._is_it(inner) and id(inner) not in self._known:
                raise LeftAlone(f"{self.name} is used in {text_of(changed)}")
        if any(isinstance(n, ast.Name) and n.id == self.name and not is_load(n) for n in ast.walk(changed)):
            if (
                not isinstance(changed, ast.Assign)
                or names_assigned(changed) != [self.name]
                or not self._is_it(changed.value)
            ):
                raise LeftAlone(f"{self.name} becomes something else in {text_of(changed)}")
            self.is_number = True
            return []
        return [changed]

    def _is_it(self, node: ast.AST) -> bool:
        return is_load(node) and node.id == self.name

    def _number(self, at: ast.AST) -> ast.Name:
        name = ast.copy_location(ast.Name(self.name, ast.Load()), at)
        self._known.add(id(name))
        return name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_it(node.value):
            if text_of(node.slice) != "0" or self.is_number:
                raise LeftAlone(f"{text_of(node)} is no number")
            return self._number(node)
        self.generic_visit(node)
        # A list of modules takes either; anything else indexed with a row of one number has one dimension more.
        if self._is_it(node.slice) and (self.is_number or (self.listed and text_of(node.value) == "self.experts")):
            node.slice = self._number(node.slice)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node.left):
            node.left = self._number(node.left)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute) and self._is_it(function.value):
            if function.attr not in ("item", "tolist") and (function.attr != "squeeze" or self.is_number):
                raise LeftAlone(f"{text_of(node)} is no number")
            if given_to(node) or (function.attr == "tolist" and not self.is_number):
                raise LeftAlone(f"{text_of(node)} is no number")
            return self._number(node)
        if isinstance(function, ast.Attribute) and function.attr == "squeeze" and given_to(node) == ["0"]:
            owner = function.value
            if isinstance(owner, ast.Subscript) and self._is_it(owner.slice) and not self.is_number:
                # mask[[3]] has a first dimension more than mask[3].
                owner.slice = self._number(owner.slice)
                return owner
        self.generic_visit(node)
        if text_of(function) == "int" and len(node.args) == 1 and self._is_it(node.args[0]):
            return self._number(node)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node.value) and self.is_number:
            node.value = self._number(node.value)
        return node
