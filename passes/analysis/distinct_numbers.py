"""Numbers of rows that come once, in Dynamo's graph: of a topk, or where a mask has at most one True in each row."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node

from hecate.passes.analysis.torch_values import shape_of, storage_of, value_of
from hecate.passes.fx import arg, is_getitem, operands, option
from hecate.passes.match import is_cast, name_of, named

_Dims = frozenset[int]
_NONE: _Dims = frozenset()


def come_once(numbers: Node, changed: Collection[int | None]) -> bool:
    """Tell whether no number comes twice, as far as the graph says.

    Args:
        numbers: a line of them: what an expert has chosen, ``scores.topk(n).indices[e]``, or ``torch.where(mask)[i]``
            and ``mask.nonzero(as_tuple=True)[i]``.
        changed: storages that are changed in place anywhere in the graph.
    """
    if _ndim(numbers) == 1 and _along(numbers, changed, _differ):
        return True
    found = numbers
    while _is_exact_cast(found) and not _is_changed(found, changed):
        found = arg(found, 0)
    if not is_getitem(found) or type(arg(found, 1)) is not int or _is_changed(found, changed):
        return False
    source = arg(found, 0)
    where = named(source, "where") and len(operands(source)) == 1
    if not (where or (named(source, "nonzero") and option(source, 1, "as_tuple") is True)):
        return False
    mask = operands(source)[0]
    dims = _ndim(mask)
    if dims == 0:
        return False
    others = {dim for dim in range(dims) if dim != arg(found, 1) % dims}
    return not others or (len(others) == 1 and others <= _along(mask, changed, _one_true))


def _ndim(node: Any) -> int:
    value = value_of(node)
    return value.ndim if isinstance(value, torch.Tensor) else 0


def _along(node: Any, changed: Collection[int | None], of: Callable[..., _Dims]) -> _Dims:
    """Return the dimensions along which ``of`` says something, of what ``node`` is a view of."""
    if _is_changed(node, changed):
        return _NONE
    view = (arg(node, 0), {dim: dim for dim in range(_ndim(node))}) if _is_exact_cast(node) else _view(node)
    if view is None:
        return of(node, changed)
    source, places = view
    return frozenset(places[dim] for dim in _along(source, changed, of) if dim in places)


def _is_changed(node: Any, changed: Collection[int | None]) -> bool:
    """Return whether a node's tensor is changed in place anywhere, or nothing is known about it."""
    return not isinstance(value_of(node), torch.Tensor) or None in changed or storage_of(node) in changed


def _is_exact_cast(node: Any) -> bool:
    """Return whether numbers, or booleans, that differ do so behind a cast, too."""
    value, before = (value_of(one) for one in (node, arg(node, 0) if is_cast(node) else None))
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    return value.dtype == before.dtype or value.dtype in (torch.int32, torch.int64)


def _one_true(node: Node, changed: Collection[int | None]) -> _Dims:
    """Return dimensions along which at most one element is True, or not zero."""
    dims = _ndim(node)
    if named(node, "one_hot"):
        # One for each number, and the numbers differ.
        return _along(arg(node, 0), changed, _differ) | {dims - 1}
    if named(node, "bool", "to", "float", "half", "bfloat16") and node.op == "call_method":
        # What is not zero stays so.
        whole = value_of(arg(node, 0))
        booleans = isinstance(whole, torch.Tensor) and not whole.is_floating_point()
        return _along(arg(node, 0), changed, _one_true) if booleans else _NONE
    if not named(node, "eq", "__eq__"):
        return _NONE
    found: set[int] = set()
    for numbers, others in (operands(node), operands(node)[::-1]):
        # Numbers that differ along a dimension are compared with one.
        behind = dims - _ndim(numbers)
        differ = {dim + behind for dim in _along(numbers, changed, _differ)}
        found |= {dim for dim in differ if _is_constant(others, dim, dims)}
    return frozenset(found)


def _is_constant(node: Any, dim: int, dims: int) -> bool:
    if not isinstance(node, Node):
        return isinstance(node, int)
    value, own = value_of(node), dim - (dims - _ndim(node))
    return isinstance(value, (int, torch.SymInt)) or (
        isinstance(value, torch.Tensor) and (own < 0 or (type(value.shape[own]) is int and value.shape[own] == 1))
    )


def _differ(node: Node, changed: Collection[int | None]) -> _Dims:
    """Return dimensions along which all numbers differ: those of a topk, or of an order."""
    source = arg(node, 0) if is_getitem(node) and arg(node, 1) == 1 else None
    if source is not None and named(source, "topk", "sort"):
        dim = option(source, 2 if named(source, "topk") else 1, "dim", -1)
    elif named(node, "argsort"):
        dim = option(node, 1, "dim", -1)
    else:
        return _NONE
    return frozenset((dim % _ndim(node),)) if type(dim) is int else _NONE


def _view(node: Node) -> tuple[Node, dict[int, int]] | None:
    """Return what a node is a view of, or a part of it, and where its dimensions are; None if it is none."""
    source = arg(node, 0) if node.args else None
    if is_getitem(node) and source is not None and named(source, "unbind"):
        whole = arg(source, 0)
        return whole, _without(_ndim(whole), option(source, 1, "dim", 0))
    if not isinstance(source, Node) or not isinstance(value_of(source), torch.Tensor):
        return None
    dims, name = _ndim(source), name_of(node)
    if is_getitem(node):
        places = _places(arg(node, 1), dims)
        return None if places is None else (source, places)
    if name == "permute":
        given = node.args[1:] if len(node.args) > 2 else option(node, 1, "dims")
        return source, {dim % dims: place for place, dim in enumerate(given)}
    if name in ("transpose", "swapaxes"):
        pair = [option(node, 1, "dim0"), option(node, 2, "dim1")]
        return source, _swapped(dims, *pair) if all(type(dim) is int for dim in pair) else {}
    if dims == 2 and (name in ("t", "numpy_T", "mT") or (name == "getattr" and arg(node, 1) in ("T", "mT"))):
        return source, _swapped(dims, 0, 1)
    if name == "unsqueeze":
        new = option(node, 1, "dim") % (dims + 1)
        return source, {dim: dim + (dim >= new) for dim in range(dims)}
    if name in ("select", "squeeze") and type(gone := option(node, 1, "dim")) is int:
        # A dimension of another size than one is not squeezed.
        kept = name == "squeeze" and not (type(size := shape_of(source)[gone]) is int and size == 1)
        return source, {} if kept else _without(dims, gone)
    if name in ("view", "reshape", "flatten"):
        last, before = shape_of(node)[-1:], shape_of(source)[-1:]
        # The numbers of a row stay together.
        kept = all(type(size) is int for size in (*last, *before)) and len(last) > 0 and last == before
        return source, {dims - 1: _ndim(node) - 1} if kept else {}
    return (source, {dim: dim for dim in range(dims)}) if name == "detach" else None


def _without(dims: int, gone: int) -> dict[int, int]:
    gone %= dims
    return {dim: dim - (dim > gone) for dim in range(dims) if dim != gone}


def _swapped(dims: int, one: int, other: int) -> dict[int, int]:
    one, other = one % dims, other % dims
    return {dim: {one: other, other: one}.get(dim, dim) for dim in range(dims)}


def _places(index: Any, dims: int) -> dict[int, int] | None:
    """Return where ``x[index]`` has the dimensions of x; None if tensors are in the index."""
    given = index if isinstance(index, tuple) else (index,)
    named_dims = sum(one is not None and one is not Ellipsis for one in given)
    places: dict[int, int] = {}
    dim = out = 0
    for one in (*given, *([] if Ellipsis in given else [Ellipsis])):
        if one is None:
            out += 1
        elif one is Ellipsis:
            for _ in range(dims - named_dims):
                places[dim] = out
                dim, out = dim + 1, out + 1
        elif isinstance(one, slice):
            places[dim] = out
            dim, out = dim + 1, out + 1
        elif type(one) is int:
            dim += 1
        else:
            return None
    return places
