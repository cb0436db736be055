"""group_expert_loops: a Python loop over experts becomes grouped matmuls over all of them.

Needs    gathered experts that are used one by one, w[0], w[1], ..., w[E-1], in the same way each.
Changes  y0 = f(x0, w[0]); y1 = f(x1, w[1]); ...
         becomes   rows = cat([x0, x1, ...]); y = f'(rows, w, offsets); y0, y1, ... = split(y)
         where f' is f with every product by an expert's matrix as a grouped one.
Never    touches how x0, x1, ... are chosen or how y0, y1, ... are combined, so it does not matter whether
         the model uses where, boolean masks or split.

The rows are then sorted by expert, which is what exchange_rows needs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hecate.passes.base import Outcome, PassContext, Refused, Skip
from hecate.passes.captured.rowwise import Kind, check_rowwise
from hecate.passes.fx import (
    ancestors,
    arg,
    calls,
    descendants,
    describe,
    gathers_by_layer,
    grad_modes,
    is_getitem,
    mutates,
    operands,
    positions,
    refuse_changes_of,
    storage_of,
    value_of,
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


def group_expert_loops(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the loop of every layer in ``gm``."""
    rewritten, skipped = 0, []
    for layer, gathers in gathers_by_layer(gm.graph).items():
        gathers = [g for g in gathers if any(_is_one_expert(user) for user in g.users)]
        if not gathers:
            continue
        try:
            turns = _find_turns(gm.graph, gathers)
            _check_order(gm.graph, turns)
        except Refused as reason:
            skipped.append(Skip(where=context.name(layer), reason=f"loop over experts: {reason}"))
            continue
        _group(gm.graph, turns)
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _is_one_expert(node: Node) -> bool:
    return is_getitem(node) and isinstance(arg(node, 1), int) and calls(arg(node, 0), torch.ops.hecate.gather_experts)


def _find_turns(graph: Graph, gathers: Sequence[Node]) -> list[_Turn]:
    """One turn per expert, all of the same form.

    Raises:
        Refused: an expert is missing, turns differ, or a turn does not keep its rows apart.
    """
    num_experts = arg(gathers[0], 1)
    place = positions(graph)
    picked: dict[int, list[Node]] = {expert: [] for expert in range(num_experts)}
    for gather in gathers:
        for user in filter(_is_one_expert, gather.users):
            picked[arg(user, 1) % num_experts].append(user)
    if not all(picked.values()):
        raise Refused(f"experts {[e for e, nodes in picked.items() if not nodes]} are never used")
    views = {expert: _views(nodes, place) for expert, nodes in picked.items()}
    everything = {view for nodes in views.values() for view in nodes}
    turns = [_turn(graph, views[expert], everything, place) for expert in range(num_experts)]
    shared = _shared_inputs(turns)
    turns = [
        _Turn(views=t.views, body=t.body, entries=tuple(n for n in t.entries if n not in shared), exit=t.exit)
        for t in turns
    ]
    for expert, turn in enumerate(turns[1:], start=1):
        _check_same(turns[0], turn, expert)
    first = turns[0]
    if not first.entries:
        raise Refused("every expert gets the same rows")
    for turn in turns:
        if len({_num_rows(entry) for entry in turn.entries}) != 1:
            raise Refused("values with different numbers of rows flow into a turn")
    _check_forms(first)
    check_rowwise([*first.views, *first.body], dict.fromkeys(first.entries, Kind.ROWS), {first.exit: Kind.ROWS})
    return turns


def _num_rows(entry: Node) -> str:
    """The number of rows of a tensor, which may be a symbol."""
    value = value_of(entry)
    return str(value.shape[0]) if isinstance(value, torch.Tensor) and value.ndim else f"none in {entry.name}"


def _views(picked: list[Node], place: dict[Node, int]) -> tuple[Node, ...]:
    found = set(picked)
    for node in sorted(descendants(picked), key=place.__getitem__):
        if all(source in found for source in node.all_input_nodes):
            found.add(node)
    return tuple(sorted(found, key=place.__getitem__))


def _turn(graph: Graph, views: tuple[Node, ...], everything: set[Node], place: dict[Node, int]) -> _Turn:
    own = set(views)
    anchors = {user for view in views for user in view.users if user not in own}
    if any(source in everything - own for anchor in anchors for source in anchor.all_input_nodes):
        raise Refused("two experts meet in one operation")
    inside = anchors | (descendants(anchors) & ancestors(anchors))
    body = tuple(sorted(inside, key=place.__getitem__))
    entries = tuple(dict.fromkeys(s for n in body for s in n.all_input_nodes if s not in inside and s not in own))
    exits = [n for n in body if any(user not in inside for user in n.users)]
    if len(exits) != 1:
        raise Refused(f"{len(exits)} values leave a turn, one is expected")
    return _Turn(views=views, body=body, entries=entries, exit=exits[0])


def _shared_inputs(turns: list[_Turn]) -> set[Node]:
    """Inputs that are the same node in every turn: not rows."""
    shared = set(turns[0].entries)
    for turn in turns[1:]:
        shared &= set(turn.entries)
    return shared


def _check_same(first: _Turn, other: _Turn, expert: int) -> None:
    pairs = (
        (first.views, other.views), (first.body, other.body), (first.entries, other.entries)
    )  # fmt: skip
    if any(len(a) != len(b) for a, b in pairs):
        raise Refused(f"expert {expert} is computed in another way than expert 0")
    match = {a: b for one, two in pairs for a, b in zip(one, two, strict=True)}
    for a, b in zip(first.views + first.body, other.views + other.body, strict=True):
        if _is_one_expert(a) and _is_one_expert(b) and a in first.views and arg(a, 0) is b.args[0]:
            continue
        wanted = torch.fx.node.map_arg((a.args, a.kwargs), lambda n: match.get(n, n))
        if (a.op, a.target) != (b.op, b.target) or wanted != (b.args, b.kwargs):
            raise Refused(f"expert {expert} is computed in another way than expert 0: {describe(b)}")


def _check_order(graph: Graph, turns: list[_Turn]) -> None:
    """Grouping computes all turns after the last entry is known: nothing before that may need an early turn."""
    place = positions(graph)
    after = descendants([turn.exit for turn in turns])
    inputs = _inputs(turns)
    if inputs & (after | {turn.exit for turn in turns}):
        raise Refused("a turn needs the result of an earlier one")
    bodies = {node for turn in turns for node in turn.body}
    refuse_changes_of(inputs, until=max(inputs | bodies, key=place.__getitem__))
    for turn in turns:
        refuse_changes_of(turn.body, until=turn.body[-1])
    last = max(place[node] for node in inputs)
    delayed = [n for n in graph.nodes if n in after and place[n] <= last]
    modes = grad_modes(graph)
    behind = next(node for node, index in place.items() if index == last).next
    if len({modes[node] for node in (*bodies, *delayed, behind)}) != 1:
        raise Refused("gradients are switched on and off in it")
    if _under_autocast(graph):
        raise Refused("it runs under autocast, which a grouped matmul does not know")
    changed = {storage_of(target) for node in delayed if (target := mutates(node)) is not None}
    if None in changed:
        raise Refused("an in-place operation between turns, on a tensor that nothing is known about")
    for node in graph.nodes:
        between = delayed and place[delayed[0]] < place[node] <= last and node not in after
        if between and any(storage_of(source) in changed for source in node.all_input_nodes):
            raise Refused(f"{describe(node)} reads what an earlier turn changed in place")


def _under_autocast(graph: Graph) -> bool:
    inside = any(calls(node, torch.amp.autocast_mode._enter_autocast) for node in graph.nodes)
    return inside or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _inputs(turns: list[_Turn]) -> set[Node]:
    """Everything that the turns compute from."""
    found: set[Node] = set()
    for turn in turns:
        own = {*turn.views, *turn.body}
        found |= {source for node in own for source in node.all_input_nodes} - own
    return found


def _check_forms(turn: _Turn) -> None:
    """Every use of the parameters has a grouped form, or this raises :class:`Refused`."""
    for node in turn.body:
        if node in _anchors(turn):
            _matrix_operand(node, set(turn.views))
    for view in turn.views:
        if not (_is_one_expert(view) or _is_transpose(view) or _name(view) in _CASTS):
            raise Refused(f"no grouped form of {describe(view)}")


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
    raise Refused(f"no grouped form of {describe(node)}")


def _group(graph: Graph, turns: list[_Turn]) -> None:
    first = turns[0]
    place = positions(graph)
    last = max(_inputs(turns), key=place.__getitem__)
    after = descendants([turn.exit for turn in turns])
    delayed = [n for n in graph.nodes if n in after and place[n] < place[last]]

    builder = _Builder(graph, last)
    # Step 1: rows of all experts in expert order, and where each expert's rows end.
    sizes = [builder.method("size", turn.entries[0], 0) for turn in turns]
    offsets = builder.call(torch.ops.hecate.sizes_to_offsets.default, sizes, first.entries[0])
    new: dict[Node, Node] = {}
    for index, entry in enumerate(first.entries):
        new[entry] = builder.call(torch.cat, [turn.entries[index] for turn in turns])
        # For the checks of later passes; they look at the row width and replace the number of rows.
        new[entry].meta["example_value"] = value_of(entry)
    offsets.meta["example_value"] = value_of(first.entries[0]).new_empty(len(turns), dtype=torch.int32)
    rows = next(iter(new.values()))

    # Step 2: the first turn's computation, on all experts.
    views = set(first.views)
    for view in first.views:
        new[view] = _grouped_view(builder, view, new)
    for node in first.body:
        use = _matrix_operand(node, views) if node in _anchors(first) else None
        if use is None:
            new[node] = builder.add(graph_copy=node, new=new)
        elif use == "bias":
            a, b = operands(node)
            bias, x = (a, b) if a in views else (b, a)
            new[node] = builder.call(operator.add, new.get(x, x), builder.lookup(new[bias], offsets, rows))
        else:
            x, w, *bias = operands(node)
            weight = new[w]
            if use == "linear":
                weight = builder.method("transpose", weight, 1, 2)
            out = builder.call(torch.ops.hecate.grouped_mm.default, new.get(x, x), weight, offsets)
            if bias and bias[0] is not None:
                value = new.get(bias[0], bias[0])
                value = builder.lookup(value, offsets, rows) if bias[0] in views else value
                out = builder.call(operator.add, out, value)
            new[node] = out
        new[node].meta |= {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}

    # Step 3: every turn's result is its part of the whole.
    changed = {storage_of(target) for node in graph.nodes if (target := mutates(node)) is not None}
    parts = builder.call(torch.split, new[first.exit], sizes)
    for expert, turn in enumerate(turns):
        part = builder.call(operator.getitem, parts, expert)
        if storage_of(turn.exit) in changed:
            # A part of a split is a view that autograd does not let anybody change in place.
            part = builder.method("clone", part)
        if "example_value" in turn.exit.meta:
            part.meta["example_value"] = turn.exit.meta["example_value"]
        turn.exit.replace_all_uses_with(part)

    # Step 4: what used early turns follows the whole; the old turns go.
    for node in delayed:
        if any(node in turn.body for turn in turns):
            continue
        builder.last.append(node)
        builder.last = node
    for turn in turns:
        for node in reversed((*turn.views, *turn.body)):
            if not node.users:
                graph.erase_node(node)


class _Builder:
    """Appends nodes one after another behind a given one."""

    def __init__(self, graph: Graph, after: Node) -> None:
        self.graph, self.last = graph, after
        self.ids: Node | None = None

    def call(self, target: Any, *args: Any) -> Node:
        with self.graph.inserting_after(self.last):
            self.last = self.graph.call_function(target, args)
        return self.last

    def method(self, name: str, *args: Any) -> Node:
        with self.graph.inserting_after(self.last):
            self.last = self.graph.call_method(name, args)
        return self.last

    def add(self, *, graph_copy: Node, new: dict[Node, Node]) -> Node:
        with self.graph.inserting_after(self.last):
            self.last = self.graph.node_copy(graph_copy, lambda n: new.get(n, n))
        self.last.meta.pop("example_value", None)
        return self.last

    def lookup(self, parameter: Node, offsets: Node, rows: Node) -> Node:
        """A parameter ``[E, N]`` by the expert of each row."""
        if self.ids is None:
            num_rows = self.method("size", rows, 0)
            self.ids = self.call(torch.ops.hecate.row_slots.default, offsets, num_rows)
            self.ids.meta["example_value"] = value_of(offsets).new_empty(1, dtype=torch.int64)
        return self.call(operator.getitem, parameter, self.ids)


_CASTS = ("to", "float", "bfloat16", "half", "contiguous", "type_as")


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_transpose(node: Node) -> bool:
    """Any spelling of the transpose of a matrix."""
    name = _name(node)
    if name == "transpose":
        return {arg(node, 1) % 2, arg(node, 2) % 2} == {0, 1}
    return name in ("t", "mT") or (name == "getattr" and arg(node, 1) in ("T", "mT"))


def _grouped_view(builder: _Builder, view: Node, new: dict[Node, Node]) -> Node:
    """The view of one expert's matrix as a view of all: a leading dimension more."""
    if arg(view, 0) not in new:
        return arg(view, 0)
    if _is_transpose(view):
        return builder.method("transpose", new[arg(view, 0)], 1, 2)
    return builder.add(graph_copy=view, new=new)
