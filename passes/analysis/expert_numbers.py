"""Numbers of experts: bounds that are known of them, and counts of each expert's rows, in Dynamo's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from hecate.passes.analysis.torch_values import mutates, storage_of, value_of
from hecate.passes.fx import is_getitem, option
from hecate.passes.match import RANGE, SHAPES, call, casts, match, name_of, named, one_of, shaped, uncast

# Calls whose results have the numbers of their first argument, or some of them.
SAME_NUMBERS = frozenset((
    *SHAPES, "squeeze", "expand", "view_as", "reshape_as", "expand_as", "transpose", "permute", "t", "contiguous",
    "clone", "detach", "long", "index_select",
))  # fmt: skip
CLAMPS = {"clamp", "clamp_", "clamp_max", "clamp_max_", "clip", "clip_"}

# Counts of each expert's rows: also (ids[:, None] == arange(E)).sum(0) and one_hot(ids, E).sum(0).
COUNTED = one_of(
    call(casts("ids"), names=("histc", "bincount"), bind="count"),
    call(
        "sum",
        casts(
            one_of(
                call("one_hot", "ids"),
                # Dynamo of torch 2.11 has ids == numbers as a method.
                call(
                    one_of(call("getitem", "ids", (slice(None), None)), shaped("ids")), RANGE, names=("eq", "__eq__")
                ),
            )
        ),
        0,
        only=True,
    ),
)


def bound_of(numbers: Any) -> int | None:
    """Return a number that all ``numbers`` are below, none being negative; None if that cannot be told."""
    while isinstance(numbers, Node):
        if may_grow(numbers):
            return None
        source = numbers.args[0] if numbers.args else None
        if is_getitem(numbers) and isinstance(source, Node):
            index, name = numbers.args[1], name_of(source)
            if isinstance(value_of(source), torch.Tensor):
                numbers = source
            elif name == "sort" and index == 0:
                numbers = source.args[0]
            elif name == "topk" and index == 1:
                return _choices(source, position=2)
            else:
                return None
        elif name_of(numbers) == "argmax":
            return _choices(numbers, position=1)
        elif named(numbers, "remainder", "mod"):
            # The remainder of a positive divisor is not negative.
            divisor = numbers.args[1] if len(numbers.args) == 2 else None
            return divisor if type(divisor) is int and divisor > 0 else None
        elif name_of(numbers) in SAME_NUMBERS:
            numbers = source
        else:
            return None
    return None


def _choices(chosen: Node, position: int) -> int | None:
    """Return the number of scores among which a topk or argmax chooses."""
    scores = value_of(chosen.args[0]) if chosen.args else None
    # argmax without a dimension counts all elements.
    dim = option(chosen, position, "dim", -1 if named(chosen, "topk") else None)
    if not isinstance(scores, torch.Tensor) or type(dim) is not int or scores.dim() == 0:
        return None
    size = scores.shape[dim]
    return size if type(size) is int else None


def may_grow(node: Node) -> bool:
    """Tell whether something is written to a node's memory that may make a number larger, or negative.

    A clamp does not, if its least number is not positive and its largest not negative.
    """
    return any(name_of(other) not in CLAMPS or not clamp_keeps(other, 0) for other in changes_of(node))


def changes_of(node: Node) -> list[Node]:
    """Return the nodes that write to a node's memory."""
    memory = storage_of(node)
    return [
        other
        for other in node.graph.nodes
        if (changed := mutates(other)) is not None
        and (changed is node or (memory is not None and storage_of(changed) == memory))
    ]


def clamp_keeps(clamp: Node, largest: int) -> bool:
    """Tell whether a clamp leaves the numbers from 0 to ``largest`` unchanged."""
    names = ("max",) if name_of(clamp).startswith("clamp_max") else ("min", "max")
    given: dict[str, Any] = dict(zip(names, clamp.args[1:], strict=False)) | clamp.kwargs
    low, high = given.get("min"), given.get("max")
    return (
        set(given) <= {"min", "max"}
        and (low is None or (type(low) is int and low <= 0))
        and (high is None or (type(high) is int and high >= largest))
    )


def count_all(offsets: Node, rows: Node) -> bool:
    """Tell whether all ``rows`` are in front of the last of ``offsets``, as far as the graph says.

    They are where ``offsets = cumsum(counts)``, and counts are of one number for each row, none beyond the last
    expert.
    """
    summed = match(casts(call("cumsum", casts("counts"))), offsets)
    counted = match(COUNTED, summed["counts"]) if summed is not None else None
    if summed is None or counted is None or changes_of(summed["counts"]) or changes_of(uncast(offsets)):
        return False
    ids, ends, every = (value_of(node) for node in (counted["ids"], offsets, rows))
    bound = bound_of(uncast(counted["ids"]))
    known = all(isinstance(value, torch.Tensor) for value in (ids, ends, every))
    return (
        known
        and bound is not None
        and statically_known_true(ids.numel() == every.shape[0])
        and statically_known_true(bound <= ends.shape[0])
        and _counts_up_to(counted.get("count"), bound)
    )


def _counts_up_to(count: Node | None, bound: int) -> bool:
    """Tell whether a histogram leaves out none of the numbers below ``bound``; other ways to count leave out none."""
    if not named(count, "histc"):
        return True
    assert count is not None
    low, high = option(count, 2, "min", 0), option(count, 3, "max", 0)
    return type(low) is int and type(high) is int and low <= 0 and high >= bound - 1 and low < high
