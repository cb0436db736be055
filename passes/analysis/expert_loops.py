"""Loops over experts in a captured graph: where they are, and whether their turns can be grouped.

They are for ``group_expert_loops``. A *turn* is the computation with one expert's parameters, a *loop* all turns of
one call of a layer. A loop that cannot be grouped raises :class:`Refused`, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from torch.fx import Node
from torch.fx.node import map_arg

from hecate.passes.analysis.expert_products import FORMS, is_elementwise, is_one_expert, is_transpose, matrix_operand
from hecate.passes.analysis.row_sums import weights_of
from hecate.passes.analysis.rowwise import Kind, check_rowwise
from hecate.passes.analysis.torch_values import PLAIN_FORM, GraphFacts, mutates, shape_of, storage_of
from hecate.passes.base import Refused
from hecate.passes.fx import (
    arg,
    between,
    closure_backward,
    closure_forward,
    computed_from,
    describe,
    exits_of,
    operands,
    reached,
)
from hecate.passes.match import is_cast


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a loop: the computation with one expert's parameters.

    Attributes:
        views: nodes computed from the expert's parameters alone, ``w[e]`` and its transposes and casts.
        body: nodes between the first and the last use of the parameters, in graph order.
        entries: row tensors that flow in and differ from turn to turn.
        exit: the row tensor that flows out.
    """

    views: tuple[Node, ...]
    body: tuple[Node, ...]
    entries: tuple[Node, ...]
    exit: Node

    @property
    def depth(self) -> int:
        """The number of dimensions that rows are in: 1 for ``[n, d]``, 2 for ``[B, n, d]``."""
        return max(len(shape_of(entry)) - 1 for entry in self.entries) or 1


@dataclass(frozen=True, kw_only=True)
class Loop:
    """All turns of a loop, and the nodes around them.

    Attributes:
        turns: one for each expert, or several, those of an expert one behind the other.
        repeats: how many for each.
        inputs: everything that the turns compute from.
        last: the last of these; the grouped computation stands behind it.
        delayed: nodes that depend on a turn's result and stand before ``last``; they move behind the whole.
    """

    turns: tuple[Turn, ...]
    repeats: int
    inputs: frozenset[Node]
    last: Node
    delayed: tuple[Node, ...]

    @classmethod
    def of(cls, turns: Sequence[Turn], repeats: int) -> Loop:
        inputs: set[Node] = set()
        for turn in turns:
            own = {*turn.views, *turn.body}
            inputs |= {source for node in own for source in node.all_input_nodes} - own
        last = max(inputs)
        delayed = sorted(closure_forward([turn.exit for turn in turns], until=last))
        return cls(turns=tuple(turns), repeats=repeats, inputs=frozenset(inputs), last=last, delayed=tuple(delayed))


_ALIKE = "compute every expert in the same way"


def find_loops(facts: GraphFacts, gathers: Sequence[Node], *, by_node: bool) -> list[Loop]:
    """Return the loops of one layer, one for each call, in graph order; see :func:`_find_loop`.

    The graph does not say how often a layer is called: it is the least number of equal parts, of the passes over the
    experts, of which each is a loop.
    """
    passes: list[list[Node]] = []
    num_experts, before = arg(gathers[0], 1), 0
    for pick in sorted(user for gather in gathers for user in gather.users if is_one_expert(user)):
        expert = arg(pick, 1) % num_experts
        if not passes or expert < before:
            passes.append([])
        passes[-1].append(pick)
        before = expert
    reasons = []
    for several in (number for number in range(1, len(passes) + 1) if len(passes) % number == 0):
        length = len(passes) // several
        parts = [list(chain(*passes[begin : begin + length])) for begin in range(0, len(passes), length)]
        try:
            loops = [_find_loop(facts, num_experts, part, by_node=by_node) for part in parts]
            _check_apart(loops)
            return loops
        except Refused as reason:
            reasons.append(reason)
    # The reason that refuses it as one loop says most.
    raise reasons[0]


def _check_apart(loops: Sequence[Loop]) -> None:
    """Check that each loop ends before the next begins, and its results are combined between."""
    for one, other in pairwise(loops):
        bodies = [[node for turn in loop.turns for node in turn.body] for loop in (one, other)]
        if max(one.last, *bodies[0]) > min(bodies[1]) or not other.inputs.isdisjoint(turn.exit for turn in one.turns):
            raise Refused("a call of the layer begins before an earlier one has ended")


def _find_loop(facts: GraphFacts, num_experts: int, picks: Sequence[Node], *, by_node: bool) -> Loop:
    """Find the loop of one call and check it, with factors of results if ``by_node``. Raises Refused."""
    turns, repeats = _find_turns(num_experts, picks)
    if by_node:
        try:
            loop = Loop.of(_with_weights(turns, repeats), repeats)
            _check_order(facts, loop)
            return loop
        except Refused:
            pass
    loop = Loop.of(turns, repeats)
    _check_order(facts, loop)
    return loop


def _find_turns(num_experts: int, picks: Sequence[Node]) -> tuple[list[Turn], int]:
    """Find the turns of every expert, all of the same form, and how many each has. Raises Refused."""
    picked: dict[int, list[Node]] = {expert: [] for expert in range(num_experts)}
    for pick in picks:
        picked[arg(pick, 1) % num_experts].append(pick)
    if not all(picked.values()):
        raise Refused(f"experts {[e for e, nodes in picked.items() if not nodes]} are never used")
    views = {expert: tuple(sorted(computed_from(nodes))) for expert, nodes in picked.items()}
    everything = {view for nodes in views.values() for view in nodes}
    of_each = [_turns(views[expert], everything) for expert in range(num_experts)]
    repeats = len(of_each[0])
    for expert, own in enumerate(of_each):
        if len(own) != repeats:
            raise Refused(f"expert {expert} has {len(own)} turns, expert 0 has {repeats}", fix=_ALIKE)
    turns = [turn for own in of_each for turn in own]
    # A node that is the same in every turn is no rows, unless every expert gets the same.
    shared = set.intersection(*(set(turn.entries) for turn in turns))
    if all(shared.issuperset(turn.entries) for turn in turns):
        shared -= _rows_of_products(turns[0])
    turns = [replace(t, entries=tuple(n for n in t.entries if n not in shared)) for t in turns]
    _check_alike(turns, repeats)
    first = turns[0]
    if not first.entries:
        raise Refused("an expert gets no rows")
    for turn in turns:
        if len({_num_rows(entry, turn.depth) for entry in turn.entries}) != 1:
            raise Refused("values with different numbers of rows flow into a turn")
    _check_forms(first)
    _check_rows_apart(first)
    return turns, repeats


def _rows_of_products(turn: Turn) -> set[Node]:
    """Return what flows into a turn's products with matrices as rows."""
    views = set(turn.views)
    products = [node for node in anchors_of(turn) if matrix_operand(node, views) in ("product", "linear")]
    return {operands(node)[0] for node in products} & set(turn.entries)


def _with_weights(turns: Sequence[Turn], repeats: int) -> list[Turn]:
    """Return the turns, each with the multiplication by its rows' routing weights ``[n, 1]``. Raises Refused."""
    found = []
    for turn in turns:
        user, *others = turn.exit.users
        weights = weights_of(user, turn.exit) if not others else None
        if weights is None or _num_rows(weights, 1) != _num_rows(turn.entries[0], turn.depth):
            raise Refused("its results are not multiplied with weights")
        found.append(replace(turn, body=(*turn.body, user), entries=(*turn.entries, weights), exit=user))
    if len({turn.entries[-1] for turn in found}) != len(found):
        raise Refused("turns have the same weights")
    _check_alike(found, repeats)
    _check_rows_apart(found[0])
    return found


def _num_rows(entry: Node, depth: int) -> str:
    """Return the number of rows of a tensor, which may be of symbols, in the dimensions that they are in."""
    shape = shape_of(entry)
    alike = len(shape) > 0 if depth == 1 else len(shape) == depth + 1
    return str(shape[:depth]) if alike else f"none in {entry.name}"


def _turns(views: tuple[Node, ...], everything: set[Node]) -> list[Turn]:
    """Return the turns of one expert: each connected part of its computation is one."""
    own = set(views)
    anchors = {user for view in views for user in view.users if user not in own}
    if any(source in everything - own for anchor in anchors for source in anchor.all_input_nodes):
        raise Refused("two experts meet in one operation")
    turns = []
    for part in _connected(anchors | between(anchors, anchors)):
        behind = closure_backward(part, since=views[0])
        _join(part)
        body = tuple(sorted(part))
        entries = tuple(dict.fromkeys(s for n in body for s in n.all_input_nodes if s not in part and s not in own))
        exits = exits_of(part)
        if len(exits) != 1:
            raise Refused(f"{len(exits)} values leave a turn, one is expected")
        used = tuple(view for view in views if view in behind)
        turns.append(Turn(views=used, body=body, entries=entries, exit=exits[0]))
    return sorted(turns, key=lambda turn: turn.body[0])


def _join(part: set[Node]) -> None:
    """Add to a turn the nodes that join several of its results, such as those of a matrix and its adapter."""
    while len(exits := exits_of(part)) > 1:
        users = {user for exit in exits for user in exit.users if user not in part}
        inner = {user for user in users if all(source in part for source in user.all_input_nodes)}
        if not inner:
            return
        part.add(min(inner))


def _connected(nodes: set[Node]) -> list[set[Node]]:
    """Return the parts of ``nodes`` between which there is no edge."""
    parts, left = [], set(nodes)
    while left:
        start = left.pop()
        part = {start} | reached([start], lambda node: nodes & {*node.users, *node.all_input_nodes})
        parts.append(part)
        left -= part
    return parts


def _check_rows_apart(turn: Turn) -> None:
    """Check that no row of a turn's result depends on another row."""
    if turn.depth == 1:
        check_rowwise([*turn.views, *turn.body], dict.fromkeys(turn.entries, Kind.ROWS), {turn.exit: Kind.ROWS})
        return
    # Products have their rows in one dimension, so what is between them is looked at.
    anchors, views = anchors_of(turn), set(turn.views)
    given = {operand for node in anchors for operand in node.all_input_nodes if operand not in views}
    rows = {*turn.entries, *anchors}
    between_them = [node for node in turn.body if node not in anchors]
    made = (given | {turn.exit}) - rows
    if not made <= set(between_them):
        raise Refused("every expert gets the same rows")
    if made:
        check_rowwise(between_them, dict.fromkeys(rows, Kind.ROWS), dict.fromkeys(made, Kind.ROWS), depth=turn.depth)


def _check_alike(turns: Sequence[Turn], repeats: int) -> None:
    """Check that all turns have the form of the first."""
    for number, turn in enumerate(turns[1:], start=1):
        _check_same(turns[0], turn, number // repeats)


def _check_same(first: Turn, other: Turn, expert: int) -> None:
    otherwise = f"expert {expert} is computed in another way than expert 0"
    pairs = ((first.views, other.views), (first.body, other.body), (first.entries, other.entries))
    if any(len(a) != len(b) for a, b in pairs):
        raise Refused(otherwise, fix=_ALIKE)
    twins = {a: b for one, two in pairs for a, b in zip(one, two, strict=True)}
    for a, b in zip(first.views + first.body, other.views + other.body, strict=True):
        if is_one_expert(a) and is_one_expert(b) and a in first.views and arg(a, 0) is b.args[0]:
            continue
        wanted = map_arg((a.args, a.kwargs), lambda node: twins.get(node, node))
        if (a.op, a.target) != (b.op, b.target) or wanted != (b.args, b.kwargs):
            raise Refused(f"{otherwise}: {describe(b)}", b, fix=_ALIKE)


def _check_order(facts: GraphFacts, loop: Loop) -> None:
    """Check that nothing before the last entry needs an early turn: grouping computes all turns after it."""
    turns = loop.turns
    exits = {turn.exit for turn in turns}
    if loop.inputs & (exits | set(loop.delayed)):
        raise Refused(
            "a turn needs the result of an earlier one",
            fix="let the turns of the loop not read what earlier ones wrote",
        )
    bodies = {node for turn in turns for node in turn.body}
    facts.refuse_changes_of(loop.inputs, until=max(loop.inputs | bodies))
    for turn in turns:
        facts.refuse_changes_of(turn.body, until=turn.body[-1])
    facts.refuse_mixed_modes((*bodies, *loop.delayed, loop.last.next), "in it")
    facts.refuse_autocast()
    changed = {storage_of(target) for node in loop.delayed if (target := mutates(node)) is not None}
    if None in changed:
        raise Refused("an in-place operation between turns, on a tensor that nothing is known about", fix=PLAIN_FORM)
    if not changed:
        return
    delayed, node = set(loop.delayed), loop.delayed[0]
    while node <= loop.last:
        if node not in delayed and any(storage_of(source) in changed for source in node.all_input_nodes):
            raise Refused(
                f"{describe(node)} reads what an earlier turn changed in place; `out[rows] += y` does, "
                "`out.index_add_(0, rows, y)` does not",
                node,
                fix="out.index_add_(0, rows, y) in place of out[rows] += y",
            )
        node = node.next


def _check_forms(turn: Turn) -> None:
    """Raise :class:`Refused` unless every use of the parameters has a grouped form."""
    rows = set(turn.entries)
    for node in turn.body:
        if not rows.isdisjoint(node.all_input_nodes):
            rows.add(node)
    for node in sorted(anchors_of(turn)):
        use, given = matrix_operand(node, set(turn.views)), operands(node)
        others = [one for one in given if one not in turn.views] if use == "vector" else given[:1]
        # What is computed of an expert's parameters and a shared matrix has no rows, and would be sorted like them.
        if rows.isdisjoint(others):
            raise Refused(f"{describe(node)} has an expert's parameter and no rows", node, fix=FORMS)
        if use in ("vector", "norm") and len(shape_of(others[0])) != turn.depth + 1:
            raise Refused(f"{describe(node)} has an expert's vector and rows in other dimensions", node, fix=FORMS)
    for view in turn.views:
        if not (is_one_expert(view) or is_transpose(view) or is_cast(view) or is_elementwise(view)):
            raise Refused(f"no grouped form of {describe(view)}", view, fix=FORMS)


# --- uses of one expert's parameter, and whether they have a form for all experts ---


def anchors_of(turn: Turn) -> set[Node]:
    return {user for view in turn.views for user in view.users if user in turn.body}
