"""Turn loops that leave out experts without tokens into loops over all experts."""

from __future__ import annotations

import ast
import copy
import logging

from hecate.wrap.loops.empty_turns import Effects, Rows
from hecate.wrap.loops.expert_number import ExpertNumber
from hecate.wrap.loops.spellings import Hits, guard_of, hits_of
from hecate.wrap.loops.syntax import LeftAlone, expression, is_load, is_method, names_assigned, text_of

log = logging.getLogger("hecate")


class Loops(ast.NodeTransformer):
    """Changes the loops of one function."""

    def __init__(self, definition: ast.FunctionDef, listed: bool) -> None:
        self.definition, self.listed = definition, listed
        self.lines: list[int] = []

    def visit_For(self, node: ast.For) -> ast.AST:
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

    def _over_hits(self, node: ast.For) -> ast.For | None:
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
        changed = ast.For(target=node.target, iter=expression(f"range({hits.mask}.shape[0])"), body=body, orelse=[])
        return ast.fix_missing_locations(ast.copy_location(changed, node))

    def _hits(self, node: ast.For) -> Hits | None:
        """Return what is iterated over, if it is all experts of a mask that have tokens."""
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
        if any(_changes(n, hits.mask) for n in later):
            raise LeftAlone(f"{hits.mask} changes between the hits and the loop")
        return hits

    def _with_guard(self, node: ast.For) -> ast.For | None:
        """Turn a loop that leaves out turns without rows into one that takes them; None for another loop."""
        turn = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        rows = Rows(None, None, 0)
        for number, statement in enumerate(node.body):
            guard = guard_of(statement)
            if guard is None:
                rows.learn(statement)
                continue
            if not rows.starts_from(guard.name, guard.mask):
                return None
            kept = [copy.deepcopy(n) for n in (*guard.body, *node.body[number + 1 :])]
            rest = self._checked(node, kept, rows, turn)
            changed = ast.For(
                target=node.target, iter=node.iter, body=[*node.body[:number], *rest], orelse=node.orelse
            )
            return ast.fix_missing_locations(ast.copy_location(changed, node))
        return None

    def _checked(self, node: ast.For, body: list[ast.stmt], rows: Rows, turn: set[str]) -> list[ast.stmt]:
        """Return ``body`` without guards; raise :class:`LeftAlone` if a turn without rows changes something."""
        inside = {id(n) for part in (*node.body, node.target) for n in ast.walk(part)}
        outside = {n.id for n in ast.walk(self.definition) if isinstance(n, ast.Name) and id(n) not in inside}
        if rows.turn in outside:
            raise LeftAlone("the loop's variable is used elsewhere")
        return Effects(outside, rows, body, turn).check(body)


def _changes(node: ast.AST, name: str) -> bool:
    """Return whether a node gives a name another value, or changes the one that it has."""
    if isinstance(node, ast.Name):
        return node.id == name and not is_load(node)
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return not isinstance(node.ctx, ast.Load) and text_of(node.value) == name
    return is_method(node) and node.func.attr.endswith("_") and text_of(node.func.value) == name
