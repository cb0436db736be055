"""group_expert_loops: a Python loop over experts becomes grouped matmuls over all of them.

Needs    gathered experts that are used one by one, w[0], w[1], ..., w[E-1], in the same way each, and each as often
         as the others (a loop over choices around it).
Changes  y0 = f(x0, w[0]); y1 = f(x1, w[1]); ...
         becomes   rows = cat([x0, x1, ...]); y = f'(rows, w, offsets); y0, y1, ... = split(y)
         where f' is f with every product by an expert's matrix as a grouped one. A layer that is called several
         times has such a computation for each call.
Never    touches how x0, x1, ... are chosen or how y0, y1, ... are combined, so it does not matter whether
         the model uses where, boolean masks or split.

The rows are then sorted by expert, which is what exchange_rows needs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.captured.rowwise import Kind, check_rowwise
from hecate.passes.captured.torch_values import (
    NO_AUTOCAST,
    ONE_GRAD_MODE,
    PLAIN_FORM,
    GraphFacts,
    gathers_by_layer,
    mutates,
    storage_of,
    under_autocast,
    value_of,
)
from hecate.passes.fx import (
    Builder,
    arg,
    between,
    calls,
    closure_backward,
    closure_forward,
    computed_from,
    describe,
    forget_value,
    is_getitem,
    operands,
    skip_of,
)


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One turn of the loop: what is computed with one expert's parameters.

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


_ALIKE = "compute every expert in the same way"
_FORMS = "x @ w[e], torch.nn.functional.linear(x, w[e]) or one addition of a bias for each expert"


def group_expert_loops(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the loop of every layer in ``gm``."""
    rewritten, skipped, facts = 0, [], GraphFacts(gm.graph)
    for layer, gathers in gathers_by_layer(gm.graph).items():
        gathers = [g for g in gathers if any(_is_one_expert(user) for user in g.users)]
        if not gathers:
            continue
        try:
            loops = _find_loops(facts, gathers, by_node=context.dispatch == "nodes" and context.nodes > 1)
        except Refused as reason:
            why = f"loop over experts: {reason}"
            skipped.append(skip_of(context.name(layer), reason, *gathers[0].users, reason=why))
            continue
        for loop in loops:
            # What stands around a loop is moved with the one before it.
            _group(facts, _Loop.of(loop.turns, loop.repeats))
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """All turns, and what stands around them.

    Attributes:
        turns: one for each expert, or several, those of an expert one behind the other.
        repeats: how many for each.
        inputs: everything that the turns compute from.
        last: the last of these; the grouped computation stands behind it.
        delayed: what depends on a turn's result and stands before ``last``; it moves behind the whole.
    """

    turns: tuple[_Turn, ...]
    repeats: int
    inputs: frozenset[Node]
    last: Node
    delayed: tuple[Node, ...]

    @classmethod
    def of(cls, turns: Sequence[_Turn], repeats: int) -> _Loop:
        inputs: set[Node] = set()
        for turn in turns:
            own = {*turn.views, *turn.body}
            inputs |= {source for node in own for source in node.all_input_nodes} - own
        last = max(inputs)
        delayed = sorted(closure_forward([turn.exit for turn in turns], until=last))
        return cls(turns=tuple(turns), repeats=repeats, inputs=frozenset(inputs), last=last, delayed=tuple(delayed))


def _find_loops(facts: GraphFacts, gathers: Sequence[Node], *, by_node: bool) -> list[_Loop]:
    """The loops of one layer, one for each call, in graph order; see :func:`_find_loop`.

    How often it is called is not written in the graph: it is the least number of equal parts, of the passes over the
    experts, of which each is a loop.
    """
    passes: list[list[Node]] = []
    num_experts, before = arg(gathers[0], 1), 0
    for pick in sorted(user for gather in gathers for user in gather.users if _is_one_expert(user)):
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
    # What is wrong with it as one loop says most.
    raise reasons[0]


def _check_apart(loops: Sequence[_Loop]) -> None:
    """Each loop ends before the next begins, and its results are combined between."""
    for one, other in pairwise(loops):
        bodies = [[node for turn in loop.turns for node in turn.body] for loop in (one, other)]
        if max(one.last, *bodies[0]) > min(bodies[1]) or not other.inputs.isdisjoint(turn.exit for turn in one.turns):
            raise Refused("a call of the layer begins before an earlier one has ended")


def _find_loop(facts: GraphFacts, num_experts: int, picks: Sequence[Node], *, by_node: bool) -> _Loop:
    """The loop of one call, checked.

    Args:
        picks: where it reads the parameters of one expert.
        by_node: take into it what results are multiplied with, if possible (see ``node_rows``).

    Raises:
        Refused: it cannot be grouped.
    """
    turns, repeats = _find_turns(num_experts, picks)
    if by_node:
        try:
            loop = _Loop.of(_with_weights(turns, repeats), repeats)
            _check_order(facts, loop)
            return loop
        except Refused:
            pass
    loop = _Loop.of(turns, repeats)
    _check_order(facts, loop)
    return loop


def _is_one_expert(node: Node) -> bool:
    return is_getitem(node) and isinstance(arg(node, 1), int) and calls(arg(node, 0), torch.ops.hecate.gather_experts)


def _find_turns(num_experts: int, picks: Sequence[Node]) -> tuple[list[_Turn], int]:
    """The turns of every expert, all of the same form, and how many each has.

    Raises:
        Refused: an expert is missing, turns differ, or a turn does not keep its rows apart.
    """
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
    # What is the same node in every turn is no rows.
    shared = set.intersection(*(set(turn.entries) for turn in turns))
    turns = [replace(t, entries=tuple(n for n in t.entries if n not in shared)) for t in turns]
    for number, turn in enumerate(turns[1:], start=1):
        _check_same(turns[0], turn, number // repeats)
    first = turns[0]
    if not first.entries:
        raise Refused("every expert gets the same rows")
    for turn in turns:
        if len({_num_rows(entry) for entry in turn.entries}) != 1:
            raise Refused("values with different numbers of rows flow into a turn")
    _check_forms(first)
    check_rowwise([*first.views, *first.body], dict.fromkeys(first.entries, Kind.ROWS), {first.exit: Kind.ROWS})
    return turns, repeats


def _with_weights(turns: Sequence[_Turn], repeats: int) -> list[_Turn]:
    """The turns, each with the multiplication by its rows' routing weights ``[n, 1]`` behind it.

    Raises:
        Refused: not every turn has one, or they differ.
    """
    found = []
    for turn in turns:
        users = list(turn.exit.users)
        if len(users) != 1 or not (calls(users[0], operator.mul, torch.mul) or users[0].target == "mul"):
            raise Refused("its results are not multiplied with weights")
        (user,) = users
        weights = [other for other in operands(user) if other is not turn.exit]
        value = value_of(weights[0]) if len(weights) == 1 else None
        is_weight = isinstance(value, torch.Tensor) and value.ndim == 2 and str(value.shape[1]) == "1"
        if not is_weight or _num_rows(weights[0]) != _num_rows(turn.entries[0]):
            raise Refused("its results are not multiplied with weights")
        found.append(replace(turn, body=(*turn.body, user), entries=(*turn.entries, weights[0]), exit=user))
    if len({turn.entries[-1] for turn in found}) != len(found):
        raise Refused("turns have the same weights")
    for number, turn in enumerate(found[1:], start=1):
        _check_same(found[0], turn, number // repeats)
    first = found[0]
    check_rowwise([*first.views, *first.body], dict.fromkeys(first.entries, Kind.ROWS), {first.exit: Kind.ROWS})
    return found


def _num_rows(entry: Node) -> str:
    """The number of rows of a tensor, which may be a symbol."""
    value = value_of(entry)
    return str(value.shape[0]) if isinstance(value, torch.Tensor) and value.ndim else f"none in {entry.name}"


def _turns(views: tuple[Node, ...], everything: set[Node]) -> list[_Turn]:
    """What is computed with one expert, each connected part of it a turn."""
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
        exits = _exits(part)
        if len(exits) != 1:
            raise Refused(f"{len(exits)} values leave a turn, one is expected")
        used = tuple(view for view in views if view in behind)
        turns.append(_Turn(views=used, body=body, entries=entries, exit=exits[0]))
    return sorted(turns, key=lambda turn: turn.body[0])


def _exits(part: set[Node]) -> list[Node]:
    return sorted(n for n in part if any(user not in part for user in n.users))


def _join(part: set[Node]) -> None:
    """Add what joins several results of a turn, such as those of a matrix and of its adapter, into one."""
    while len(exits := _exits(part)) > 1:
        users = {user for exit in exits for user in exit.users if user not in part}
        inner = {user for user in users if all(source in part for source in user.all_input_nodes)}
        if not inner:
            return
        part.add(min(inner))


def _connected(nodes: set[Node]) -> list[set[Node]]:
    """The parts of ``nodes`` between which there is no edge."""
    parts, left = [], set(nodes)
    while left:
        part, waiting = set(), [left.pop()]
        while waiting:
            node = waiting.pop()
            part.add(node)
            near = left & {*node.users, *node.all_input_nodes}
            left -= near
            waiting += near
        parts.append(part)
    return parts


def _check_same(first: _Turn, other: _Turn, expert: int) -> None:
    pairs = (
        (first.views, other.views), (first.body, other.body), (first.entries, other.entries)
    )  # fmt: skip
    if any(len(a) != len(b) for a, b in pairs):
        raise Refused(f"expert {expert} is computed in another way than expert 0", fix=_ALIKE)
    match = {a: b for one, two in pairs for a, b in zip(one, two, strict=True)}
    for a, b in zip(first.views + first.body, other.views + other.body, strict=True):
        if _is_one_expert(a) and _is_one_expert(b) and a in first.views and arg(a, 0) is b.args[0]:
            continue
        wanted = torch.fx.node.map_arg((a.args, a.kwargs), lambda n: match.get(n, n))
        if (a.op, a.target) != (b.op, b.target) or wanted != (b.args, b.kwargs):
            raise Refused(f"expert {expert} is computed in another way than expert 0: {describe(b)}", b, fix=_ALIKE)


def _check_order(facts: GraphFacts, loop: _Loop) -> None:
    """Grouping computes all turns after the last entry is known: nothing before that may need an early turn."""
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
    if len({facts.grad_mode(node) for node in (*bodies, *loop.delayed, loop.last.next)}) != 1:
        raise Refused("gradients are switched on and off in it", fix=ONE_GRAD_MODE)
    if under_autocast(facts.graph):
        raise Refused(
            "it runs under autocast, which a grouped matmul does not know",
            fix=NO_AUTOCAST,
        )
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


def _check_forms(turn: _Turn) -> None:
    """Every use of the parameters has a grouped form, or this raises :class:`Refused`."""
    for node in turn.body:
        if node in _anchors(turn):
            _matrix_operand(node, set(turn.views))
    for view in turn.views:
        if not (_is_one_expert(view) or _is_transpose(view) or _name(view) in _CASTS):
            raise Refused(f"no grouped form of {describe(view)}", view, fix=_FORMS)


def _anchors(turn: _Turn) -> set[Node]:
    return {user for view in turn.views for user in view.users if user in turn.body}


_PRODUCTS = (torch.matmul, operator.matmul, torch.mm)
_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)
_SUMS = (operator.add, torch.add)


def _matrix_operand(node: Node, views: set[Node]) -> str:
    """How an anchor uses an expert's parameter: "product", "linear" or "bias".

    Raises:
        Refused: in no way that has a grouped form.
    """
    args = operands(node)
    own = [index for index, arg in enumerate(args) if arg in views]
    method = node.target if node.op == "call_method" else None
    if (calls(node, *_PRODUCTS) or method in ("matmul", "mm")) and own == [1] and len(args) == 2:
        return "product"
    if calls(node, *_LINEAR) and own and own[0] == 1 and set(own) <= {1, 2}:
        return "linear"
    if (calls(node, *_SUMS) or method == "add") and len(own) == 1 and len(args) == 2:
        value = value_of(args[own[0]])
        if isinstance(value, torch.Tensor) and value.ndim == 1:
            return "bias"
    raise Refused(f"no grouped form of {describe(node)}", node, fix=_FORMS)


def _group(facts: GraphFacts, loop: _Loop) -> None:
    """All turns in one, behind the last of their inputs."""
    first, here = loop.turns[0], Builder(facts.graph, after=loop.last)
    # Step 1: rows of all experts in expert order, and where each expert's rows end.
    sizes = [here.method("size", turn.entries[0], 0) for turn in loop.turns]
    of_experts = sizes[:: loop.repeats]
    for again in range(1, loop.repeats):
        of_experts = [
            here.call(operator.add, *pair) for pair in zip(of_experts, sizes[again :: loop.repeats], strict=True)
        ]
    offsets = here.call(torch.ops.hecate.sizes_to_offsets.default, of_experts, first.entries[0])
    offsets.meta["example_value"] = value_of(first.entries[0]).new_empty(len(of_experts), dtype=torch.int32)
    new: dict[Node, Node] = {}
    for entries in zip(*(turn.entries for turn in loop.turns), strict=True):
        rows = new[entries[0]] = here.call(torch.cat, list(entries))
        # For the checks of later passes; they look at the row width and replace the number of rows.
        rows.meta["example_value"] = value_of(entries[0])

    # Step 2: the first turn's computation, on all experts.
    by_id = _ByExpert(here, offsets, new[first.entries[0]])
    for view in first.views:
        new[view] = _grouped_view(here, view, new)
    anchors = _anchors(first)
    for node in first.body:
        if node in anchors:
            new[node] = _grouped_anchor(here, node, set(first.views), new, by_id)
        else:
            new[node] = here.copy(node, new)
            forget_value(new[node])
        new[node].meta |= {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}

    # Step 3: every turn's result is its part of the whole.
    changed = {storage for _, storage in facts.changes}
    parts = here.call(torch.split, new[first.exit], sizes)
    for expert, turn in enumerate(loop.turns):
        part = here.call(operator.getitem, parts, expert)
        if storage_of(turn.exit) in changed:
            # A part of a split is a view that autograd does not let anybody change in place.
            part = here.method("clone", part)
        if "example_value" in turn.exit.meta:
            part.meta["example_value"] = turn.exit.meta["example_value"]
        turn.exit.replace_all_uses_with(part)

    # Step 4: what used early turns follows the whole; the old turns go.
    old = {node for turn in loop.turns for node in turn.body}
    last = here.last
    for node in loop.delayed:
        if node not in old:
            last.append(node)
            last = node
    for node in sorted({node for turn in loop.turns for node in (*turn.views, *turn.body)}, reverse=True):
        if not node.users:
            facts.graph.erase_node(node)


def _grouped_anchor(here: Builder, node: Node, views: set[Node], new: dict[Node, Node], by_id: _ByExpert) -> Node:
    """A product or sum with one expert's parameter as one with those of all experts."""
    use = _matrix_operand(node, views)
    if use == "bias":
        a, b = operands(node)
        bias, x = (a, b) if a in views else (b, a)
        return here.call(operator.add, new.get(x, x), by_id.lookup(new[bias]))
    x, w, *biases = operands(node)
    weight = here.method("transpose", new[w], 1, 2) if use == "linear" else new[w]
    out = here.call(torch.ops.hecate.grouped_mm.default, new.get(x, x), weight, by_id.offsets)
    if biases and biases[0] is not None:
        bias = new.get(biases[0], biases[0])
        out = here.call(operator.add, out, by_id.lookup(bias) if biases[0] in views else bias)
    return out


class _ByExpert:
    """Looks parameters ``[E, N]`` up by the expert of each row; the ids are made when they are first needed."""

    def __init__(self, here: Builder, offsets: Node, rows: Node) -> None:
        self.here, self.offsets, self.rows = here, offsets, rows
        self._ids: Node | None = None

    def lookup(self, parameter: Node) -> Node:
        if self._ids is None:
            num_rows = self.here.method("size", self.rows, 0)
            self._ids = self.here.call(torch.ops.hecate.row_slots.default, self.offsets, num_rows)
            self._ids.meta["example_value"] = value_of(self.offsets).new_empty(1, dtype=torch.int64)
        return self.here.call(operator.getitem, parameter, self._ids)


_CASTS = ("to", "float", "bfloat16", "half", "contiguous", "type_as")


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_transpose(node: Node) -> bool:
    """Any spelling of the transpose of a matrix."""
    name = _name(node)
    if name == "transpose":
        return {arg(node, 1) % 2, arg(node, 2) % 2} == {0, 1}
    return name in ("t", "mT") or (name == "getattr" and arg(node, 1) in ("T", "mT"))


def _grouped_view(here: Builder, view: Node, new: dict[Node, Node]) -> Node:
    """The view of one expert's matrix as a view of all: a leading dimension more."""
    if arg(view, 0) not in new:
        return arg(view, 0)
    if _is_transpose(view):
        return here.method("transpose", new[arg(view, 0)], 1, 2)
    copy = here.copy(view, new)
    forget_value(copy)
    return copy
