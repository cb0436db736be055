"""Which rows are of one token, and proof that a token's row may cross to another node once.

Rows may be exchanged by nodes (``hecate.runtime.ops.exchange_nodes``) if

1. every entry of the region is a gather by token: rows of one token are equal, and of their gradients only the sum is
   used;
2. of every exit only the sum over a token's rows is used, by the same token index.

What models multiply a result with before they sum, the routing weight of its row, moves into the region; it travels
as another entry, a single value for each row. Recognized are

    hidden[index]; out.index_add(0, index, y)                                 any index of tokens, also a mask
    hidden[order // k]; y[inverse of order].view(T, k, H).sum(1)              as transformers' grouped_mm has it
    cat([hidden[i0], ...]); a, ... = split(y); out.index_add_(0, i0, a) ...   from group_expert_loops

and casts in between. Everything else is refused, with the operator's name; then each row travels by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from hecate.passes.base import Refused
from hecate.passes.captured.find_region import Region
from hecate.passes.captured.rowwise import Kind, check_rowwise
from hecate.passes.captured.torch_values import GraphFacts, mutates, storage_of, value_of
from hecate.passes.fx import arg, calls, closure_forward, describe, is_getitem, operands


@dataclass(frozen=True, kw_only=True)
class NodeRows:
    """A region whose rows may cross to each node once.

    Attributes:
        region: with the multiplications by routing weights in it, and the weights among its entries.
        weights: those entries ``[R, 1]``; the others are gathered by token.
        tokens: the token of each row, int, or a mask of tokens; the concatenation of several where the rows are one.
        choices: rows of each token; 0 where the graph does not tell.
    """

    region: Region
    weights: tuple[Node, ...]
    tokens: tuple[Node, ...]
    choices: int


def prove_node_rows(facts: GraphFacts, region: Region) -> NodeRows:
    """Prove both facts. Exits that were cut in parts and put together again are used whole afterwards.

    Raises:
        Refused: one cannot be proven, with the reason.
    """
    gathered = [_gathered_by(facts, entry) for entry in region.entries]
    tokens = gathered[0]
    if not all(_same_index(tokens, other) for other in gathered[1:]):
        raise Refused("its rows are gathered by different tokens")
    body = set(region.body)
    for exit in region.exits:
        if any(user in body for user in exit.users):
            raise Refused(f"{describe(exit)} is used inside the experts and behind them", exit)
    exits = [_Exit(exit, region.entries[0]) for exit in region.exits]
    last = max(exit.follow(facts, tokens) for exit in exits)
    facts.refuse_changes_of(_all_behind(tokens), until=last)
    weighted = _with_weights(facts, region, exits)
    choices = {count for index in tokens if (count := _choices(index))}
    return NodeRows(
        region=weighted,
        weights=tuple(entry for entry in weighted.entries if entry not in region.entries),
        tokens=tokens,
        choices=choices.pop() if len(tokens) == len(choices) == 1 else 0,
    )


# --- the entries ---


def _gathered_by(facts: GraphFacts, entry: Node) -> tuple[Node, ...]:
    """The index by which rows were gathered from one tensor of tokens, in pieces."""
    pieces = [_gather(piece) for piece in _pieces(entry)]
    if len({source for source, _ in pieces}) != 1:
        raise Refused("its rows are gathered from different tensors")
    # A tensor that changes between two gathers would give a token two rows.
    facts.refuse_changes_of([entry, *_pieces(entry), *_casts_behind(entry), pieces[0][0]], until=entry)
    return tuple(index for _, index in pieces)


def _pieces(rows: Node) -> list[Node]:
    """What rows are the concatenation of."""
    rows = _casts_behind(rows)[-1]
    whole = _joined_split(rows)
    if whole is not None:
        return _pieces(whole)
    if _is_cat(rows):
        return [_casts_behind(piece)[-1] for piece in arg(rows, 0)]
    return [rows]


def _gather(rows: Node) -> tuple[Node, Node]:
    """The tensor of tokens and the index of ``tokens[index]``."""
    flat = _named(rows, ("reshape", "view")) and is_getitem(arg(rows, 0))
    if flat and _adds_a_line(arg(rows, 0), rows):
        source, (_, index) = arg(arg(rows, 0), 0), arg(arg(rows, 0), 1)
    elif is_getitem(rows):
        source, index = arg(rows, 0), arg(rows, 1)
    elif _named(rows, ("index_select",)) and len(rows.args) == 3 and arg(rows, 1) == 0:
        source, index = arg(rows, 0), arg(rows, 2)
    else:
        raise Refused(f"its rows come from {describe(rows)}, which is no gather by token", rows)
    if not isinstance(source, Node) or not _is_line(value_of(index)):
        raise Refused(f"its rows come from {describe(rows)}, which is no gather by token", rows)
    return source, index


def _is_line(value: Any) -> bool:
    """Whether it is a line of integers, the numbers of tokens, or of booleans, a mask of them."""
    kinds = (torch.int64, torch.int32, torch.bool)
    return isinstance(value, torch.Tensor) and value.ndim == 1 and value.dtype in kinds


def _adds_a_line(gathered: Node, rows: Node) -> bool:
    """Whether ``rows`` is ``x[None, index].reshape(-1, H)``, which is ``x[index]``."""
    index, source, flat = arg(gathered, 1), value_of(arg(gathered, 0)), value_of(rows)
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not None:
        return False
    shapes = isinstance(source, torch.Tensor) and isinstance(flat, torch.Tensor) and source.ndim == flat.ndim == 2
    return shapes and str(source.shape[1]) == str(flat.shape[1])


def _choices(index: Node) -> int:
    """k of ``order // k``; 0 for anything else."""
    divided = _divided(index)
    return divided[1] if divided is not None else 0


def _divided(index: Node) -> tuple[Node, int] | None:
    """``order`` and k of ``order // k``, where order is the permutation that sorts a line."""
    floor = index.kwargs.get("rounding_mode") == "floor" and _named(index, ("div", "divide"))
    if not (calls(index, operator.floordiv) or _named(index, ("floor_divide",)) or floor) or len(index.args) != 2:
        return None
    order, choices = arg(index, 0), arg(index, 1)
    return (order, choices) if isinstance(choices, int) and isinstance(order, Node) and _is_order(order) else None


def _is_order(order: Node) -> bool:
    """Whether it is the permutation by which a line is sorted."""
    value = value_of(order)
    if not isinstance(value, torch.Tensor) or value.ndim != 1:
        return False
    return _named(order, ("argsort",)) or (
        is_getitem(order) and arg(order, 1) == 1 and _named(arg(order, 0), ("sort",))
    )


# --- the exits ---


@dataclass(eq=False)
class _Exit:
    """An exit on its way to the sums.

    Attributes:
        exit: the exit itself.
        entry: the rows in whose order it is.
        inside: the nodes that move into the region: multiplications, and casts before them, in order.
        factors: the routing weights that it is multiplied with.
        joined: pairs of a concatenation of all parts of a value, and that value.
    """

    exit: Node
    entry: Node
    inside: list[Node] = field(default_factory=list)
    factors: list[Node] = field(default_factory=list)
    joined: list[tuple[Node, Node]] = field(default_factory=list)

    def follow(self, facts: GraphFacts, tokens: Sequence[Node]) -> Node:
        """Walk to where the rows of each token are summed; the last node of that.

        Raises:
            Refused: something else uses the rows.
        """
        rows = last_inside = self.exit
        casts: list[Node] = []
        while True:
            user = _only_user(rows)
            parts = _parts_of(user, rows)
            if _is_cast(user):
                casts.append(user)
                rows = user
            elif (factor := _factor(user, rows)) is not None:
                for node in (last_inside, *casts):
                    # Of what is computed elsewhere now, not even the length can be asked here.
                    if len(node.users) != 1:
                        raise Refused(f"the length of {describe(node)} is used behind the experts", node)
                self.factors.append(factor)
                self.inside += [*casts, user]
                casts, rows = [], user
                last_inside = user
            elif parts is not None and (whole := _joined(parts)) is not None:
                self.joined.append((whole, rows))
                rows = whole
            else:
                break
        last = self._sum(facts, rows, user, tokens)
        wholes = [whole for whole, _ in self.joined]
        facts.refuse_changes_of([*self.inside, *casts, *self.factors, *wholes], until=last)
        return last

    def _sum(self, facts: GraphFacts, rows: Node, user: Node, tokens: Sequence[Node]) -> Node:
        """Check that ``user`` sums a token's rows; the last node of the sum."""
        if (parts := _parts_of(user, rows)) is not None:
            if not _cut_alike(user, self.entry, parts):
                raise Refused(f"{describe(user)} cuts its results in other parts than its rows", user)
            return _added_in_turns(facts, [_added(_after_casts(part)) for part in parts], tokens)
        added = _added(rows) if _is_sum_by_index(user) else None
        if added is not None:
            if not _same_index((added[1],), tokens):
                raise Refused(f"{describe(user)} sums by another index than that of the tokens", user)
            return user
        # Back in the order of the tokens: all choices of a token stand together.
        divided = _divided(tokens[0]) if len(tokens) == 1 else None
        if divided is None or not (is_getitem(user) and arg(user, 0) is rows and _inverts(facts, user, divided[0])):
            raise Refused(f"its results go to {describe(user)}, which is no sum over the rows of a token", user)
        return _summed_by_choice(user, divided[1], value_of(self.exit))


def _only_user(rows: Node) -> Node:
    users = [user for user in rows.users if not _is_length(user)]
    if len(users) != 1:
        what = " and ".join(describe(user) for user in users[:2]) if users else "nothing"
        raise Refused(f"its results are used by {what}, and not by one sum over the rows of a token")
    return users[0]


def _is_length(node: Node) -> bool:
    return calls(node, torch.ops.aten.sym_size.int) or (node.op == "call_method" and node.target == "size")


def _factor(user: Node, rows: Node) -> Node | None:
    """The weight ``[R, 1]`` that a multiplication has for each row."""
    if not (calls(user, operator.mul, torch.mul) or (user.op == "call_method" and user.target == "mul")):
        return None
    given = operands(user)
    others = [other for other in given if other is not rows]
    if len(given) != 2 or len(others) != 1 or not isinstance(others[0], Node):
        return None
    value = value_of(others[0])
    if not isinstance(value, torch.Tensor) or value.ndim != 2 or not value.is_floating_point():
        return None
    # A single row would be one weight for all.
    return others[0] if str(value.shape[1]) == "1" and str(value.shape[0]) != "1" else None


def _inverts(facts: GraphFacts, user: Node, order: Node) -> bool:
    """Whether the index of ``rows[index]`` is the inverse of the permutation ``order``."""
    inverse = arg(user, 1)
    if not isinstance(inverse, Node) or value_of(inverse) is None:
        return False
    if _named(inverse, ("argsort",)):
        return arg(inverse, 0) is order and len(inverse.args) == 1 and not inverse.kwargs.get("descending")
    # inverse = empty_like(order); inverse[order] = arange(len(order))
    made = _named(inverse, ("empty_like", "zeros_like")) and arg(inverse, 0) is order
    changes = [node for node, storage in facts.changes if storage == storage_of(inverse) and not node._erased]
    if not made or len(changes) != 1 or not calls(changes[0], operator.setitem) or changes[0] > user:
        return False
    target, index, values = (arg(changes[0], position) for position in range(3))
    return target is inverse and index is order and _named(values, ("arange",)) and _counts_up(values)


def _counts_up(arange: Node) -> bool:
    """Whether an ``arange`` begins at 0 with steps of 1."""
    return len(arange.args) == 1 or (len(arange.args) == 2 and arg(arange, 0) == 0)


def _summed_by_choice(rows: Node, choices: int, whole: Any) -> Node:
    """Check ``rows.view(T, k, H).sum(1)``; the sum."""
    view = _only_user(_after_casts(rows))
    value = value_of(view)
    if not _named(view, ("view", "reshape", "unflatten")) or not isinstance(value, torch.Tensor):
        raise Refused(f"its results go to {describe(view)}, which is no sum over the rows of a token", view)
    width = whole.shape[1:] if isinstance(whole, torch.Tensor) else value_of(rows).shape[1:]
    if value.ndim != 3 or value.shape[1] != choices or value.shape[2:] != width:
        raise Refused(f"{describe(view)} does not put the {choices} rows of a token together", view)
    total = _only_user(_after_casts(view))
    dim = total.kwargs.get("dim", total.args[1] if len(total.args) > 1 else None)
    if not _named(total, ("sum",)) or dim not in (1, -2, (1,), [1], (-2,), [-2]):
        raise Refused(f"its results go to {describe(total)}, which is no sum over the rows of a token", total)
    return total


def _is_sum_by_index(node: Node) -> bool:
    return _named(node, ("index_add", "index_add_", "index_put", "index_put_"))


def _added(rows: Node) -> tuple[Node, Node]:
    """The sum ``out.index_add(0, index, rows)`` or ``out.index_put((index,), rows, True)``, and its index."""
    node = _only_user(rows)
    given = operands(node)
    if _named(node, ("index_put", "index_put_")) and len(given) == 4 and given[3] is True:
        where = given[1]
        if given[2] is rows and given[0] is not rows and isinstance(where, (tuple, list)) and len(where) == 1:
            return node, where[0]
    if (
        not _named(node, ("index_add", "index_add_"))
        or len(given) != 4
        or given[1] != 0
        or given[3] is not rows
        or given[0] is rows
    ):
        raise Refused(f"its results go to {describe(node)}, which is no sum over the rows of a token", node)
    return node, given[2]


def _added_in_turns(facts: GraphFacts, sums: Sequence[tuple[Node, Node]], tokens: Sequence[Node]) -> Node:
    """Check that parts are added to one tensor, which nobody reads before the last; the last sum."""
    nodes = [node for node, _ in sums]
    if not _same_index([index for _, index in sums], tokens):
        raise Refused(f"{describe(nodes[0])} sums by another index than that of the tokens")
    first, last = min(nodes), max(nodes)
    targets = [mutates(node) for node in nodes]
    if all(target is None for target in targets):
        # out = out.index_add(...), turn by turn.
        for before, after in zip(sorted(nodes), sorted(nodes)[1:], strict=False):
            if set(before.users) != {after} or arg(after, 0) is not before:
                raise Refused(f"{describe(before)} is used before the rows of each token are summed", before)
        return last
    memory = {storage_of(target) for target in targets}
    if len(memory) != 1 or None in memory or None in targets:
        raise Refused("its results are summed in different tensors")
    node = first
    while node is not last:
        if node not in nodes and any(storage_of(source) in memory for source in node.all_input_nodes):
            raise Refused(f"{describe(node)} reads a sum before the rows of each token are in it", node)
        node = node.next
    return last


# --- parts of rows ---


def _parts_of(user: Node, rows: Node) -> list[Node] | None:
    """All parts of ``split(rows, sizes)`` along the rows, in order; None for anything else."""
    if not _named(user, ("split", "split_with_sizes")) or arg(user, 0) is not rows:
        return None
    sizes = user.args[1] if len(user.args) > 1 else None
    dim = user.kwargs.get("dim", user.args[2] if len(user.args) > 2 else 0)
    if not isinstance(sizes, (list, tuple)) or dim != 0 or not all(map(is_getitem, user.users)):
        return None
    parts = {arg(part, 1): part for part in user.users}
    if len(parts) != len(user.users) or sorted(parts) != list(range(len(sizes))):
        return None
    return [parts[index] for index in range(len(sizes))]


def _joined(parts: Sequence[Node]) -> Node | None:
    """The concatenation of exactly these parts, if nothing else uses them."""
    users = {user for part in parts for user in part.users}
    whole = next(iter(users)) if len(users) == 1 else None
    return whole if whole is not None and _is_cat(whole) and list(arg(whole, 0)) == list(parts) else None


def _joined_split(rows: Node) -> Node | None:
    """x of ``cat(split(x, sizes))``."""
    if not _is_cat(rows):
        return None
    first = arg(rows, 0)[0]
    split = arg(first, 0) if is_getitem(first) else None
    if not isinstance(split, Node) or not isinstance(split.args[0] if split.args else None, Node):
        return None
    parts = _parts_of(split, arg(split, 0))
    whole: Node = arg(split, 0)
    return whole if parts is not None and list(arg(rows, 0)) == parts else None


def _drop_parts(whole: Node, rows: Node) -> None:
    """Use rows in place of the concatenation of their parts."""
    parts = list(arg(whole, 0))
    split = arg(parts[0], 0)
    whole.replace_all_uses_with(rows)
    whole.graph.erase_node(whole)
    for node in (*parts, split):
        if not node.users:
            node.graph.erase_node(node)


def _cut_alike(split: Node, entry: Node, parts: Sequence[Node]) -> bool:
    """Whether results are cut where their rows were put together."""
    rows = _casts_behind(entry)[-1]
    if not _is_cat(rows) or len(arg(rows, 0)) != len(parts):
        return False
    return all(
        _is_length(size) and arg(size, 0) is piece and list(size.args[1:]) == [0]
        for size, piece in zip(arg(split, 1), arg(rows, 0), strict=True)
    )


def _is_cat(node: Node) -> bool:
    along_rows = bool(node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) == 0)
    return _named(node, ("cat", "concat")) and along_rows and isinstance(arg(node, 0), (list, tuple))


# --- casts and indexes ---

_CASTS = ("to", "float", "double", "bfloat16", "half", "contiguous", "type_as", "clone")


def _is_cast(node: Node) -> bool:
    """Whether a method leaves all values where they are, and what they are but for rounding."""
    value = value_of(node)
    if node.op != "call_method" or node.target not in _CASTS:
        return False
    return value.is_floating_point() if isinstance(value, torch.Tensor) else node.target in ("clone", "contiguous")


def _casts_behind(node: Node) -> list[Node]:
    """``node``, and what it is a cast of."""
    found = [node]
    while _is_cast(found[-1]):
        found.append(arg(found[-1], 0))
    return found


def _after_casts(rows: Node) -> Node:
    """What becomes of rows after casts."""
    while _is_cast(user := _only_user(rows)):
        rows = user
    return rows


def _same_index(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether indexes are the same node, or the same quotient of the same node."""
    if len(a) != len(b):
        return False
    return all(one is other or _same_quotient(one, other) for one, other in zip(a, b, strict=True))


def _same_quotient(a: Any, b: Any) -> bool:
    if not isinstance(a, Node) or not isinstance(b, Node):
        return False
    alike = (a.op, a.target, a.args, a.kwargs) == (b.op, b.target, b.args, b.kwargs)
    return bool(alike) and calls(a, operator.floordiv)


def _all_behind(tokens: Sequence[Node]) -> list[Node]:
    """Indexes, and the permutation that one is a quotient of."""
    return [*tokens, *(divided[0] for index in tokens if (divided := _divided(index)) is not None)]


def _named(node: object, names: tuple[str, ...]) -> bool:
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in names


# --- the region with its weights ---


def _with_weights(facts: GraphFacts, region: Region, exits: Sequence[_Exit]) -> Region:
    """The region with multiplications by routing weights in it, checked."""
    inside = [node for exit in exits for node in exit.inside]
    factors = [factor for exit in exits for factor in exit.factors]
    late = closure_forward(region.body, until=max(factors)) if factors else set()
    for factor in factors:
        if factor in late:
            raise Refused(f"{describe(factor)} is computed from the experts' own result", factor)
    if len({facts.grad_mode(node) for node in (*inside, *region.exits)}) != 1:
        raise Refused("gradients are switched on and off behind the experts")
    for exit in exits:
        for whole, rows in exit.joined:
            _drop_parts(whole, rows)
    body = tuple(sorted({*region.body, *inside}))
    weighted = replace(
        region,
        entries=tuple(dict.fromkeys((*region.entries, *factors))),
        body=body,
        exits=tuple(exit.inside[-1] if exit.inside else exit.exit for exit in exits),
    )
    kinds = {
        **dict.fromkeys(weighted.gathers, Kind.SLOTS),
        **dict.fromkeys(weighted.entries, Kind.ROWS),
        region.offsets: Kind.OFFSETS,
    }
    if region.ids is not None:
        kinds[region.ids] = Kind.IDS
    if inside:
        check_rowwise(list(body), kinds, dict.fromkeys(weighted.exits, Kind.ROWS))
    return weighted
