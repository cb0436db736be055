"""sort_lookups: experts that are looked up for every token become grouped matmuls.

Needs    matrices w[ids] of gathered experts in einsums with rows, where ids [T, k] or [R] come from a topk or argmax.
Changes  y = einsum("ti,tkoi->tko", x, w[ids]) + b[ids]      with w [E, o, i]
         becomes   order = argsort(ids.flatten()); rows = x[order // k]
                   y = grouped_mm(rows, w.transpose(1, 2), offsets) + b[ids.flatten()[order]]
                   and back into the order and sizes of ids
         where offsets say where each expert's rows end. The looked-up matrices, one for each token, are never made.
Never    touches code between the products that mixes tokens or choices, or moves their dimensions.

The rows are then sorted by expert, which is what exchange_rows needs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.cells import Cells, rewrite_layers
from hecate.passes.analysis.expert_numbers import bound_of
from hecate.passes.analysis.rowwise import Kind
from hecate.passes.analysis.torch_values import GraphFacts, shape_of, value_of
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import (
    Builder,
    arg,
    calls,
    computed_from,
    describe,
    erase_unused,
    is_getitem,
    take_place,
)


def sort_lookups(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the products of every layer in ``gm``."""
    return rewrite_layers(gm, context, "experts that are looked up", _rewrite_layer)


def _rewrite_layer(gathers: Sequence[Node]) -> bool:
    found = _find(GraphFacts(gathers[0].graph), gathers)
    if found is not None:
        _rewrite(found, int(arg(gathers[0], 1)))
    return found is not None


@dataclass(frozen=True, kw_only=True)
class _Product:
    """An einsum of rows with a looked-up matrix; ``transposed`` if the parameter is ``[E, out, in]``."""

    rows: Node
    matrix: Node
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class _LookedUp:
    """The computation of one layer, on ``[T, k, ...]`` or ``[R, ...]``, and the numbers that are looked up."""

    ids: Node
    products: dict[Node, _Product]
    cells: Cells


def _find(facts: GraphFacts, gathers: Sequence[Node]) -> _LookedUp | None:
    """Find the looked-up experts of one layer and check them; None if it has none. Raises Refused."""
    num_experts = arg(gathers[0], 1)
    # Of views, those that have a row for each expert.
    slots = [slot for slot in computed_from(gathers) if shape_of(slot)[:1] == (num_experts,)]
    lookups = {user: ids for slot in slots for user in slot.users if (ids := _numbers_of(user, slot)) is not None}
    products = {
        user: product
        for lookup, ids in lookups.items()
        for user in lookup.users
        if (product := _product(user, lookup, ids)) is not None
    }
    if not products:
        return None
    ids, *others = dict.fromkeys(lookups.values())
    if others:
        raise Refused(f"by two different numbers, {describe(ids)} and {describe(others[0])}", others[0])
    bound = bound_of(ids)
    if bound is None or bound > num_experts:
        raise Refused(f"cannot tell that {describe(ids)} are numbers of experts, from a topk or argmax", ids)
    vectors = [lookup for lookup in lookups if all(lookup is not product.matrix for product in products.values())]
    rows = {node: product.rows for node, product in products.items()}
    cells = Cells.find(facts, rows, vectors, lookups, ids)
    of_each = [entry for entry in cells.entries if _has_all(entry, ids)]
    cells.check_apart(Kind.ROWS, dict.fromkeys((*cells.vectors, *of_each), Kind.ROWS), depth=len(shape_of(ids)))
    return _LookedUp(ids=ids, products=products, cells=cells)


def _numbers_of(node: Node, slot: Node) -> Node | None:
    """Return the numbers by which a node looks experts up, ``slot[ids]`` or ``slot[ids, ...]``; None for another."""
    if not is_getitem(node) or arg(node, 0) is not slot:
        return None
    index = arg(node, 1)
    if isinstance(index, tuple) and index[1:] in ((Ellipsis,), (slice(None),), (slice(None), slice(None))):
        index = index[0]
    integers = isinstance(index, Node) and getattr(value_of(index), "dtype", None) in (torch.int64, torch.int32)
    return index if integers and len(shape_of(index)) in (1, 2) else None


def _product(node: Node, lookup: Node, ids: Node) -> _Product | None:
    """Return an einsum of rows ``[T, k, d]``, ``[T, d]`` or ``[R, d]`` with matrices; None for anything else."""
    if not calls(node, torch.einsum) or len(node.args) != 3 or not isinstance(arg(node, 0), str):
        return None
    inputs, arrow, result = arg(node, 0).replace(" ", "").partition("->")
    letters, given = inputs.split(","), [arg(node, 1), arg(node, 2)]
    if given[0] is lookup:
        letters, given = letters[::-1], given[::-1]
    depth, (x, w) = len(shape_of(ids)), letters
    if not arrow or given[1] is not lookup or given[0] is lookup or len(w) != depth + 2 or "." in inputs + result:
        return None
    numbers, (first, second) = w[:depth], w[depth:]
    for summed, made in ((first, second), (second, first)):
        # Without the choice, rows of a token go to all of its experts.
        of_rows = {numbers + summed} | ({numbers[:-1] + summed} if depth == 2 else set())
        # A size of 1 would be broadcast.
        wanted = (*shape_of(ids)[: len(x) - 1], shape_of(lookup)[w.index(summed)])
        alike = str(tuple(shape_of(given[0]))) == str(wanted)
        if len({*w}) == len(w) and x in of_rows and alike and result == numbers + made:
            return _Product(rows=given[0], matrix=lookup, transposed=summed == second)
    return None


def _has_all(entry: Node, ids: Node) -> bool:
    """Return whether a row tensor has a row for each number, and not one for all choices of a token."""
    return len(shape_of(entry)) == len(shape_of(ids)) + 1


def _rewrite(found: _LookedUp, num_experts: int) -> None:
    cells, ids, new = found.cells, found.ids, dict[Node, Node]()
    graph, depth = ids.graph, len(shape_of(ids))

    def in_front(here: Builder, rows: Node) -> Node:
        """Write rows ``[R, d]`` as ``[R, 1, d]``, where calls mean the dimensions of ``[T, k, d]``."""
        return here.method("unsqueeze", rows, 1) if depth == 2 else rows

    # Step 1: rows of all experts in expert order, and where each expert's end.
    here = Builder(graph, after=cells.last)
    numbers, order = here.parts(here.call(torch.sort, here.method("reshape", ids, -1), stable=True), 2)
    inverse = here.call(torch.argsort, order)
    every = here.call(torch.arange, num_experts, device=value_of(ids).device)
    offsets = here.call(torch.searchsorted, numbers, every, right=True, out_int32=True)
    for entry in cells.entries:
        if _has_all(entry, ids):
            rows = here.call(operator.getitem, here.method("flatten", entry, 0, depth - 1), order)
        else:
            token = here.call(operator.floordiv, order, here.method("size", ids, -1))
            rows = here.call(operator.getitem, entry, token)
        new[entry] = in_front(here, rows)
    # Step 2: vectors by the expert of each row.
    if cells.vectors:
        slots = here.call(torch.ops.hecate.row_slots.default, offsets, here.method("size", order, 0))
        for vector in cells.vectors:
            new[vector] = in_front(here, here.call(operator.getitem, arg(vector, 0), slots))

    # Step 3: the body on rows.
    def multiply(here: Builder, node: Node) -> Node:
        product = found.products[node]
        rows = here.method("squeeze", new[product.rows], 1) if depth == 2 else new[product.rows]
        weight = arg(product.matrix, 0)
        if product.transposed:
            weight = here.method("transpose", weight, 1, 2)
        return in_front(here, here.call(torch.ops.hecate.grouped_mm.default, rows, weight, offsets, True))

    cells.write(new, here.last, multiply)
    # Step 4: results are in the order of the numbers again; the old body goes.
    inside = set(cells.body)
    for exit in cells.exits:
        here = Builder(graph, after=new[exit])
        rows = here.call(operator.getitem, new[exit], inverse)
        sizes = [here.method("size", ids, dim) for dim in range(depth)]
        take_place(exit, here.method("reshape", rows, *sizes, *shape_of(exit)[depth:]), unless=inside.__contains__)
    erase_unused((*cells.body, *cells.vectors, *(product.matrix for product in found.products.values())))
