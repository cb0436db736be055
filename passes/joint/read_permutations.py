"""read_permutations: what is added to rows by a permutation is read by its inverse.

Needs    a joint graph with zeros.index_put([p], y, accumulate), as autograd writes it for x[p], or with
         zeros.index_add(0, p, y), where p is the order of a sort or the inverse of one: rows sorted by expert, and
         back. On accelerators also p // k: rows that read their tokens, k for each token.
Changes  zeros.index_put([p], y, True)        becomes   y[q], where q is the inverse of p
         zeros.index_put([p // k], y, True)   becomes   y[q].view(n // k, k, ...).sum(1)
Never    does so where the zeros have another number of rows, or the numbers are not known to be a permutation.

The same values but for the sign of zeros, in one pass over the rows, which Inductor fuses with what stands in front.
To add is to write zeros first, and on accelerators it is atomic: in any order, and in bfloat16 rounded each time. The
k rows of a token are summed in the order of its choices instead, in float32. CPUs add in order, and faster than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, arg, calls, erase_unused, is_getitem, option, take_place
from hecate.passes.joint.additions import added, adds_in_any_order, is_zeros, same_sizes, value_of, writes_sums

aten, prims = torch.ops.aten, torch.ops.prims


def read_permutations(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every such addition in ``gm``."""
    count = 0
    for node in list(gm.graph.nodes):
        # The rows that it adds may be the result of the rewrite before.
        if (operands := added(node)) is not None and _rewrite(node, *operands):
            count += 1
    return Outcome(rewritten=count)


def _rewrite(addition: Node, zeros: Node, index: Node, rows: Node) -> bool:
    order, each = _shared_by(index) if adds_in_any_order(value_of(addition)) else (index, 1)
    if not is_zeros(zeros) or not is_order(order):
        return False
    (room, *sizes), (count, *row) = value_of(zeros).shape, value_of(rows).shape
    if not same_sizes([count, *row], [room * each, *sizes]) or not same_sizes(value_of(order).shape, [count]):
        return False
    here, inverse = Builder(addition.graph, before=addition, like=addition), _inverse_of(order, addition)
    read = here.call(aten.index.Tensor, rows, [inverse])
    if each > 1:
        split = here.call(aten.view.default, read, [-1, each, *_sizes_of(row, rows, here)])
        read = here.call(aten.sum.dim_IntList, split, [1])
    take_place(addition, read)
    erase_unused([addition, zeros])
    return True


def _shared_by(index: Node) -> tuple[Node, int]:
    """Return p and k of ``p // k``; any other index, and 1."""
    halved = calls(index, aten.div.Tensor_mode) and index.kwargs.get("rounding_mode") in ("floor", "trunc")
    if (halved or calls(index, aten.floor_divide)) and isinstance(index.args[1], int) and index.args[1] > 0:
        return arg(index, 0), index.args[1]
    return index, 1


def _sizes_of(sizes: Sequence[Any], rows: Node, here: Builder) -> list[Any]:
    """Return the sizes of a row as a graph may hold them: symbols by nodes that ask for them."""
    return [
        size if isinstance(size, int) else here.call(aten.sym_size.int, rows, place)
        for place, size in enumerate(sizes, start=1)
    ]


def is_order(node: Node) -> bool:
    """Tell whether values are 0, 1, ... in some order: where a sort found its results, or the inverse of that."""
    return _sorted_from(node) is not None or _inverted_from(node) is not None


def _sorted_from(order: Node) -> Node | None:
    """Return the values that were sorted to find ``order``, if they have one dimension."""
    sort = arg(order, 0) if is_getitem(order) and arg(order, 1) == 1 else None
    found: Node | None = arg(sort, 0) if calls(sort, aten.sort, aten.sort.stable) else None
    return found if found is not None and value_of(found).dim() == 1 else None


def _ascends(order: Node) -> bool:
    """Tell whether a sort is ascending; the order of a sorted order is then its inverse."""
    return not option(arg(order, 0), 2, "descending", False)


def _inverted_from(inverse: Node) -> Node | None:
    """Return the order of which this is the inverse, written as ``inverse[order] = arange(n)``."""
    # An inverse of another dtype may be no index, or a mask.
    if not calls(inverse, aten.index_put) or writes_sums(inverse) or value_of(inverse).dtype != torch.int64:
        return None
    room, indices, numbers = (arg(inverse, place) for place in range(3))
    if len(indices) != 1 or not _counts_up(numbers) or not is_order(indices[0]):
        return None
    order, shape = indices[0], value_of(indices[0]).shape
    return order if same_sizes(value_of(room).shape, shape) and same_sizes(value_of(numbers).shape, shape) else None


def _counts_up(node: Any) -> bool:
    """Tell whether values are 0, 1, 2, ..."""
    if calls(node, prims.iota):
        return (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)
    if calls(node, aten.arange.start, aten.arange.start_step):
        return bool(arg(node, 0) == 0 and (len(node.args) < 3 or arg(node, 2) == 1))
    return calls(node, aten.arange)


def _inverse_of(order: Node, user: Node) -> Node:
    """Return the inverse of an order: one that exists in front of ``user``, or a new one behind the order."""
    if (source := _inverted_from(order)) is not None:
        return source
    source = _sorted_from(order)
    if source is not None and _ascends(order) and is_order(source):
        return source
    for other in order.users:
        for part in other.users if calls(other, aten.sort, aten.sort.stable) else {other: None}:
            if part < user and (order is _inverted_from(part) or (order is _sorted_from(part) and _ascends(part))):
                return part
    here, like = Builder(order.graph, after=order, like=order), value_of(order)
    length: Any = like.shape[0] if isinstance(like.shape[0], int) else here.length(order)
    # This is what Inductor has made of ``arange`` by now.
    numbers = here.call(
        prims.iota.default, length, start=0, step=1, dtype=like.dtype, device=like.device, requires_grad=False
    )
    return here.call(aten.index_put.default, order, [order], numbers)
