"""flatten_batches: products with experts as their batch dimension become grouped matmuls.

Needs    gathered experts in torch.bmm, matmul or einsum with the experts as batch: every expert has C rows.
Changes  h = bmm(x, w1); y = bmm(f(h), w2)       with x [E, C, d]
         becomes   rows = x.flatten(0, 1)        [E C, 1, d]
                   h = grouped_mm(rows, w1, offsets); y = grouped_mm(f(h), w2, offsets).view(E, C, ...)
         where offsets are C, 2C, ..., EC. A bias [E, 1, d] is looked up by each row's expert.
Never    touches code between the products that mixes experts or rows, or moves their dimensions.

The rows are then sorted by expert, which is what exchange_rows needs. f keeps its dimensions: the first two become
one, and one of size 1.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.cells import Cells, rewrite_layers
from hecate.passes.analysis.rowwise import Kind
from hecate.passes.analysis.torch_values import GraphFacts, shape_of
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import (
    Builder,
    arg,
    calls,
    computed_from,
    describe,
    erase_unused,
    take_place,
)
from hecate.passes.match import named


def flatten_batches(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the products of every layer in ``gm``."""
    return rewrite_layers(gm, context, "batched products", _rewrite_layer)


def _rewrite_layer(gathers: Sequence[Node]) -> bool:
    num_experts = int(arg(gathers[0], 1))
    _spell_einsum_as_bmm(gathers, num_experts)
    cells = _find(GraphFacts(gathers[0].graph), gathers, num_experts)
    if cells is not None:
        _rewrite(cells, num_experts)
    return cells is not None


def _find(facts: GraphFacts, gathers: Sequence[Node], num_experts: int) -> Cells | None:
    """Find the batched products of one layer, on ``[E, C, ...]``, and check them; None if it has none.

    Entries may have a first dimension of 1, for the same rows. Raises Refused.
    """
    views = computed_from(gathers)
    users = {user for view in views for user in view.users if user not in views}
    products = {
        node: arg(node, 0)
        for node in users
        if named(node, "bmm", "matmul")
        and arg(node, 1) in views
        and len(shape_of(arg(node, 1))) == len(shape_of(arg(node, 0))) == 3
        and shape_of(arg(node, 1))[0] == num_experts
    }
    if not products:
        return None
    biases = {
        view for view in views if shape_of(view)[:2] == (num_experts, 1) and any(u in users for u in view.users)
    }
    cells = Cells.find(facts, products, biases, views)
    if len({str(shape_of(entry)[1]) for entry in cells.entries}) != 1:
        raise Refused("products of different numbers of rows")
    for entry in cells.entries:
        if shape_of(entry)[0] not in (1, num_experts):
            raise Refused(f"{describe(entry)} is not [{num_experts}, C, d]", entry)
    if any(isinstance(size, torch.SymInt) for node in cells.exits for size in shape_of(node)[2:]):
        raise Refused("a width of its result is not known")
    cells.check_apart(Kind.CELLS, dict.fromkeys(biases, Kind.SLOTS) | dict.fromkeys(cells.entries, Kind.CELLS))
    return cells


def _rewrite(cells: Cells, num_experts: int) -> None:
    graph, new = cells.body[0].graph, dict[Node, Node]()
    # Step 1: rows of all experts in expert order, and where each expert's end.
    first = cells.entries[0]
    here = Builder(graph, after=max((first, *cells.vectors)))
    sizes = [here.method("size", first, 1)] * num_experts
    offsets = here.call(torch.ops.hecate.sizes_to_offsets.default, sizes, first)
    for entry in cells.entries:
        here = Builder(graph, after=max(entry, here.last))
        whole = entry
        if shape_of(entry)[0] != num_experts:
            whole = here.method("expand", entry, num_experts, -1, -1)
        new[entry] = here.method("unsqueeze", here.method("flatten", whole, 0, 1), 1)
    # Step 2: biases by the expert of each row.
    if cells.vectors:
        ids = here.call(torch.ops.hecate.row_slots.default, offsets, here.method("size", new[first], 0))
        for bias in cells.vectors:
            new[bias] = here.call(operator.getitem, bias, ids)

    # Step 3: the body on rows.
    def multiply(here: Builder, node: Node) -> Node:
        rows = here.method("squeeze", new[arg(node, 0)], 1)
        product = here.call(torch.ops.hecate.grouped_mm.default, rows, arg(node, 1), offsets, True)
        return here.method("unsqueeze", product, 1)

    cells.write(new, here.last, multiply)
    # Step 4: results have their two dimensions again; the old body goes.
    inside = set(cells.body)
    for exit in cells.exits:
        here = Builder(graph, after=new[exit])
        size = here.method("size", first, 1)
        result = here.method("reshape", new[exit], num_experts, size, *shape_of(exit)[2:])
        take_place(exit, result, unless=inside.__contains__)
    erase_unused(cells.body)


def _spell_einsum_as_bmm(gathers: Sequence[Node], num_experts: int) -> None:
    """Write products of rows and experts by einsum as permutations around ``bmm``; others stay."""
    views = computed_from(gathers)
    for node in sorted({user for view in views for user in view.users if calls(user, torch.einsum)}):
        equation = arg(node, 0).replace(" ", "") if isinstance(arg(node, 0), str) else ""
        if len(node.args) != 3 or equation.count(",") != 1 or "->" not in equation:
            continue
        x, w = arg(node, 1), arg(node, 2)
        *letters, result = _with_letters(equation, shape_of(x), shape_of(w))
        if x in views:
            x, w, letters = w, x, letters[::-1]
        if w not in views or x in views or len(shape_of(w)) != 3:
            continue
        plan = _plan(letters[0], letters[1], result)
        if plan is not None and shape_of(w)[letters[1].index(plan.expert)] == num_experts:
            _write(node, x, w, plan)


def _with_letters(equation: str, *shapes: Sequence[object]) -> list[str]:
    """Return the letters of all dimensions of two inputs and the result, with letters for those of an ellipsis.

    Where an ellipsis broadcasts, it stays.
    """
    inputs, _, result = equation.partition("->")
    letters = inputs.split(",")
    left = [letter for letter in string.ascii_uppercase if letter not in equation]
    dots = [shape[: len(shape) - len(text) + 3] for text, shape in zip(letters, shapes, strict=True) if "..." in text]
    if not all(text.startswith("...") for text in letters if "..." in text) or len({*map(str, dots)}) > 1:
        return [*letters, result]
    named = "".join(left[: len(dots[0])]) if dots else ""
    return [text.replace("...", named) for text in (*letters, result)]


@dataclass(frozen=True)
class _Plan:
    """An einsum as a batched product: letters of the experts, of the rows, and of the dimensions summed and made."""

    expert: str
    x: str
    w: str
    rows: str
    summed: str
    made: str
    result: str


def _plan(x: str, w: str, result: str) -> _Plan | None:
    """Return the plan of ``ecd,edf->ecf`` and the like; None for anything else."""
    if (
        "." in x + w + result
        or len({*x}) != len(x)
        or len({*w}) != len(w)
        or len({*result}) != len(result)
        or len(w) != 3
    ):
        return None
    summed = [letter for letter in w if letter in x and letter not in result]
    made = [letter for letter in w if letter not in x and letter in result]
    # The experts are in the result; they may be missing in the rows, which then go to all of them.
    expert = [letter for letter in w if letter in result and letter not in (*summed, *made)]
    if not expert and len(made) == 2:
        expert, made = made[:1], made[1:]
        # The parameter tells which of the two is the experts': they come first.
        if w.index(expert[0]) != 0:
            return None
    if not len(summed) == len(made) == len(expert) == 1:
        return None
    rows = "".join(letter for letter in x if letter not in (expert[0], summed[0]))
    if not rows or {*result} != {*rows, *expert, *made}:
        return None
    return _Plan(expert[0], x, w, rows, summed[0], made[0], result)


def _write(node: Node, x: Node, w: Node, plan: _Plan) -> None:
    here = Builder(node.graph, before=node)

    def permuted(source: Node, letters: str, wanted: str) -> Node:
        order = [letters.index(letter) for letter in wanted]
        return source if order == sorted(order) else here.method("permute", source, *order)

    # [E, rows..., d], [E, d, f]
    has_expert = plan.expert in plan.x
    rows = permuted(x, plan.x, (plan.expert if has_expert else "") + plan.rows + plan.summed)
    if not has_expert:
        rows = here.method("unsqueeze", rows, 0)
    sizes = None
    if len(plan.rows) > 1:
        sizes = [here.method("size", x, plan.x.index(letter)) for letter in plan.rows]
        rows = here.method("flatten", rows, 1, -2)
    if not has_expert:
        rows = here.method("expand", rows, shape_of(w)[plan.w.index(plan.expert)], -1, -1)
    weight = permuted(w, plan.w, plan.expert + plan.summed + plan.made)
    here.like = node
    out = here.call(torch.bmm, rows, weight)
    here.like = None
    if sizes is not None:
        out = here.method("unflatten", out, 1, tuple(sizes))
    out = permuted(out, plan.expert + plan.rows + plan.made, plan.result)
    take_place(node, out)
    node.graph.erase_node(node)
