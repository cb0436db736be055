"""drop_sentinels: masks of expert numbers that no token can have are dropped.

transformers up to 5.17 guards its experts against numbers beyond the last one, with which a router stands for experts
of other processes, also where there are none. Who computes with the mask computes from this rank's own tokens.

Needs    expert numbers that come from a topk or argmax over E scores, or a remainder of E, sorted and reshaped in any
         way.
Changes  mask = (ids >= E).unsqueeze(-1); x.masked_fill_(mask, 0); y = y.masked_fill(mask, 0)   become   x and y
         ids.clamp_(max=E - 1)                                                                   becomes  ids
Never    touches a comparison with a smaller number, or numbers of which it cannot be told where they come from.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hecate.passes.analysis.torch_values import mutates, storage_of, value_of
from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import calls, is_getitem
from hecate.passes.match import name_of

# They have the numbers of their first argument, or some of them.
_SAME_NUMBERS = {
    "view",
    "reshape",
    "flatten",
    "unsqueeze",
    "squeeze",
    "expand",
    "transpose",
    "permute",
    "t",
    "contiguous",
    "clone",
    "detach",
    "long",
    "index_select",
    "view_as",
    "reshape_as",
    "expand_as",
}
_FILLS = {"masked_fill", "masked_fill_"}
_REMAINDERS = {"remainder", "mod"}
_CLAMPS = {"clamp", "clamp_", "clamp_max", "clamp_max_", "clip", "clip_"}


def drop_sentinels(gm: GraphModule, context: PassContext) -> Outcome:
    """One after the other, since what is dropped last may have changed the numbers before."""
    rewritten = 0
    for node in list(gm.graph.nodes):
        name, source = name_of(node), node.args[0] if node.args else None
        if not isinstance(source, Node) or not (_fills_nothing(node, name) or _clamps_nothing(node, name)):
            continue
        if name.endswith("_") or _may_be_one(source, node):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            rewritten += 1
    if rewritten:
        _drop_unused_masks(gm.graph)
    return Outcome(rewritten=rewritten)


def _fills_nothing(node: Node, name: str) -> bool:
    if name not in _FILLS or len(node.args) < 2 or not _is_never(node.args[1]):
        return False
    # A mask may be larger than what it masks.
    before, after = value_of(node.args[0]), value_of(node)
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.shape == after.shape


def _clamps_nothing(node: Node, name: str) -> bool:
    if name not in _CLAMPS:
        return False
    bound = _bound(node.args[0])
    return bound is not None and _keeps(node, bound - 1)


def _keeps(clamp: Node, largest: int) -> bool:
    """Whether a clamp leaves the numbers from 0 to ``largest`` as they are."""
    names = ("max",) if name_of(clamp).startswith("clamp_max") else ("min", "max")
    given: dict[str, Any] = dict(zip(names, clamp.args[1:], strict=False)) | clamp.kwargs
    low, high = given.get("min"), given.get("max")
    return (
        set(given) <= {"min", "max"}
        and (low is None or (type(low) is int and low <= 0))
        and (high is None or (type(high) is int and high >= largest))
    )


def _is_never(mask: Any) -> bool:
    """Whether a mask is false everywhere: numbers at least as large as all that there can be."""
    # Each of them, for a copy has memory of its own.
    while isinstance(mask, Node) and name_of(mask) in _SAME_NUMBERS and mask.args and not _is_changed(mask):
        mask = mask.args[0]
    if not isinstance(mask, Node) or name_of(mask) != "ge" or len(mask.args) != 2 or mask.kwargs:
        return False
    bound, least = _bound(mask.args[0]), mask.args[1]
    return bound is not None and type(least) is int and least >= bound and not _is_changed(mask)


def _bound(numbers: Any) -> int | None:
    """Which number all of ``numbers`` are below, none being negative; None if that cannot be told."""
    while isinstance(numbers, Node):
        if _is_changed(numbers):
            return None
        source = numbers.args[0] if numbers.args else None
        if is_getitem(numbers) and isinstance(source, Node):
            index, name = numbers.args[1], name_of(source)
            if isinstance(value_of(source), torch.Tensor) or (name == "sort" and index == 0):
                numbers = source if isinstance(value_of(source), torch.Tensor) else source.args[0]
            elif name == "topk" and index == 1:
                return _choices(source, position=2)
            else:
                return None
        elif name_of(numbers) == "argmax":
            return _choices(numbers, position=1)
        elif name_of(numbers) in _REMAINDERS:
            # Of a positive number, it has that sign.
            divisor = numbers.args[1] if len(numbers.args) == 2 else None
            return divisor if type(divisor) is int and divisor > 0 else None
        elif name_of(numbers) in _SAME_NUMBERS:
            numbers = source
        else:
            return None
    return None


def _choices(chosen: Node, position: int) -> int | None:
    """Among how many a topk or argmax chooses.

    Args:
        position: of the dimension among the arguments.
    """
    scores = value_of(chosen.args[0]) if chosen.args else None
    dim = chosen.kwargs.get("dim", chosen.args[position] if len(chosen.args) > position else None)
    if dim is None:
        # argmax without a dimension counts all elements.
        dim = -1 if name_of(chosen) == "topk" else None
    if not isinstance(scores, torch.Tensor) or type(dim) is not int or scores.dim() == 0:
        return None
    size = scores.shape[dim]
    return size if type(size) is int else None


def _is_changed(node: Node) -> bool:
    """Whether something is written to its memory that may make a number larger, or negative.

    A clamp does not, if its least number is not positive and its largest not negative.
    """
    return any(name_of(other) not in _CLAMPS or not _keeps(other, 0) for other in _changes(node))


def _changes(node: Node) -> list[Node]:
    memory = storage_of(node)
    found = []
    for other in node.graph.nodes:
        changed = mutates(other) if other.op.startswith("call") else None
        if changed is not None and (changed is node or (memory is not None and storage_of(changed) == memory)):
            found.append(other)
    return found


def _may_be_one(source: Node, copy: Node) -> bool:
    """Whether a copy may be what it was copied from: nothing is written to either afterwards."""
    return not _changes(copy) and all(change < copy for change in _changes(source))


def _drop_unused_masks(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        is_mask = name_of(node) == "ge" or calls(node, operator.ge) or name_of(node) in _SAME_NUMBERS
        value = value_of(node)
        if is_mask and not node.users and isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            graph.erase_node(node)
