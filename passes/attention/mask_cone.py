"""Cones of attention masks, by which the contents of a mask are found: it is computed.

The *cone* of a mask is all nodes from which it is computed. Where that is sizes and constants alone, the mask is the
same in every step, and running its nodes shows it, however a library spells it:

    queries = arange(s) ... le = keys <= queries ... mask = le.expand(2, 1, s, s)    at s = 3    1 0 0
                                                                                                 1 1 0
                                                                                                 1 1 1

The caller chooses the sizes that the graph leaves open. Results at some sizes hold for all others only as far as the
operators allow it: :meth:`MaskCone.reach` says which sizes have to be tried. Fixed sizes are run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from hecate.passes.analysis.torch_values import value_of
from hecate.passes.attention.attention_calls import Scope
from hecate.passes.attention.open_sizes import (
    MOST,
    Watch,
    as_number,
    coefficients,
    is_size,
    sizes_of,
    solve,
    symbols_in,
)
from hecate.passes.base import Refused
from hecate.passes.fx import calls, describe, operands
from hecate.private import HigherOrderOperator, disable_current_modes, dynamo_source

# Elements of a value that is computed in one piece.
PIECE = 2**24


class MaskCone:
    """The nodes that compute one mask; sizes are numbers or SymInts, ``batch`` 1 where the mask has none."""

    def __init__(self, mask: Node, scope: Scope) -> None:
        """Collect the cone. Raises Refused if it holds data or something that must not be run."""
        value = value_of(mask)
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            raise Refused("the mask is no tensor of queries and keys")
        self.mask = mask
        self.batch, self.queries, self.keys = value.shape[0] if value.ndim > 2 else 1, *value.shape[-2:]
        self._order: list[Node] = []
        self._alias: dict[Node, Node] = {}
        self._members: dict[Scope, list[Node]] = {}
        self._collect(scope)
        self.is_fixed = not any(symbols_in(size) for node in self._order for size in sizes_of(value_of(node)))
        self._watch = Watch()

    def refuse_changes(self, scope: Scope, argument: Node, *, until: Node) -> None:
        """Raise Refused if the mask is changed in place before ``until``, a node of ``scope`` that takes it."""
        here: Scope | None = scope
        point: Node | None = until
        while here is not None and point is not None:
            values = [*([argument] if here is scope else []), *self._members.get(here, [])]
            if values:
                here.facts.refuse_changes_of(values, until=point)
            point = here.call
            here = here.outer

    def reach(self) -> int:
        """Return how large open sizes must be tried, so that nothing new can come beyond.

        The values of a cone are linear in positions and sizes except at breaks: it may only add, compare, select and
        move positions, and count truths. Breaks lie no farther out than sums of its constants, twice as far for every
        addition of two of its values. Call it right after the mask was run at small sizes, which shows the operators.

        Raises:
            Refused: an operator does more than that, such as a division, or a type has too few digits.
        """
        if self._watch.beyond is not None:
            raise Refused(f"the mask is computed with {self._watch.beyond}, and may differ at lengths never tried")
        for node in self._order:
            for size in sizes_of(value_of(node)):
                coefficients(size)
        # The pattern at a fixed length is seen whole.
        fixed = {size for size in (self.queries, self.keys) if not symbols_in(size)}
        shapes = {c for node in self._order if _only_shapes(node) for c in _constants(node)} - fixed
        others = [c for node in self._order if not _only_shapes(node) for c in _constants(node) if c not in fixed]
        return 2 * math.ceil(sum(max(1, abs(c)) for c in (*shapes, *others))) * 2**self._watch.sums + 8

    def rows(self, batch: int, queries: int, keys: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the mask at these sizes in blocks of queries, last first, with each first query. Raises Refused."""
        numbers = solve([(self.batch, batch), (self.queries, queries), (self.keys, keys)])
        shapes = {
            node: as_number(tuple(value.shape), numbers)
            for node in self._order
            if isinstance(value := value_of(node), torch.Tensor)
        }
        if math.prod(shapes[self.mask]) > MOST:
            raise Refused(f"the mask has {math.prod(shapes[self.mask]):,} elements, too many to look at")
        self._watch.sums = 0
        values: dict[Node, Any] = {}
        large: list[Node] = []
        for node in self._order:
            if math.prod(shapes.get(node, ())) > PIECE:
                large.append(node)
            elif any(self._alias.get(source, source) in large for source in _read_by(node)):
                raise Refused(f"the mask is too large for {describe(node)}")
            else:
                values[node] = self._run(node, values, numbers)
                if node in shapes and tuple(values[node].shape) != shapes[node]:
                    raise Refused(f"the mask has another shape when it is computed: {describe(node)}")
        widest = max((math.prod(shapes[node]) for node in large), default=1)
        step = max(1, queries * PIECE // widest) if large else queries
        for first in reversed(range(0, queries, step)):
            count = min(step, queries - first)
            block = (
                {node: _rows_of(value, queries, first, count) for node, value in values.items()} if large else values
            )
            for node in large:
                block[node] = self._run_rows(node, block, shapes[node], queries, count)
            yield first, block[self.mask]

    def _collect(self, scope: Scope) -> None:
        done: set[Node] = set()
        stack = [(scope, self.mask, False)]
        while stack:
            here, node, sources_done = stack.pop()
            if node in done:
                continue
            if sources_done:
                done.add(node)
                self._order.append(node)
                self._members.setdefault(here, []).append(node)
                continue
            where, source = here.resolve(node)
            if source is not node:
                done.add(node)
                self._alias[node] = source
                self._members.setdefault(here, []).append(node)
                stack.append((where, source, False))
                continue
            _refuse_data(node)
            stack.append((here, node, True))
            stack += [(here, source, False) for source in _read_by(node)]

    def _arguments(self, node: Node, values: Mapping[Node, Any]) -> tuple[Any, Any]:
        def replace(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return values[self._alias.get(leaf, leaf)]
            named = isinstance(leaf, str) and leaf.partition(":")[0] in ("cuda", "xpu", "mps", "meta")
            return torch.device("cpu") if named or isinstance(leaf, torch.device) else leaf

        args, kwargs = node.args, dict(node.kwargs)
        first: tuple[Any, ...] = ()
        if _reads_shape_only(node):
            first, args = (values[node],), args[1:]
        new: Any = map_aggregate(args, replace)
        return (*first, *new), map_aggregate(kwargs, replace)

    def _run(self, node: Node, values: dict[Node, Any], numbers: Mapping[Any, int]) -> Any:
        if is_size(value_of(node)):
            return as_number(value_of(node), numbers)
        if _reads_shape_only(node):
            like = value_of(node.args[0])
            # It is one element in memory: a node that reads the shape reads nothing else.
            zero = torch.zeros((), dtype=like.dtype, device="cpu")
            values[node] = zero.expand(as_number(tuple(like.shape), numbers))
        return self._call(node, *self._arguments(node, values))

    def _run_rows(
        self, node: Node, block: Mapping[Node, Any], shape: tuple[int, ...], queries: int, count: int
    ) -> Any:
        """Compute some rows of a large value, each from the same row of its large operands."""
        wanted = (*shape[:-2], count, shape[-1])
        self._watch.by_rows = True
        try:
            if _reads_shape_only(node) or not shape[-2:-1] == (queries,):
                raise Refused(f"the mask is too large for {describe(node)}")
            args, kwargs = self._arguments(node, block)
            if node.op == "call_method" and node.target == "expand":
                args = (args[0], wanted)
            rows = self._call(node, args, kwargs)
        finally:
            self._watch.by_rows = False
        if tuple(rows.shape) != wanted:
            raise Refused(f"the mask is too large for {describe(node)}")
        return rows

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        target: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        try:
            with disable_current_modes(), torch.device("cpu"), torch.no_grad(), self._watch:
                return target(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
        except Refused as refused:
            raise Refused(f"the mask is computed with {refused}: {describe(node)}") from None
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Refused(f"the mask cannot be computed beforehand: {describe(node)}: {first}") from error


def _rows_of(value: Any, queries: int, first: int, count: int) -> Any:
    """Return rows of a value that is broadcast to a large one: dimensions line up from the right."""
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[-2] == queries:
        return value.narrow(-2, first, count)
    return value


_SHAPE_ONLY_METHODS = ("new_full", "new_ones", "new_zeros")
_SHAPE_ONLY = (torch.full_like, torch.ones_like, torch.zeros_like)


def _reads_shape_only(node: Node) -> bool:
    """Tell whether a call uses nothing of its first operand but the shape, type and device."""
    by_method = node.op == "call_method" and node.target in _SHAPE_ONLY_METHODS
    known = bool(node.args) and isinstance(value_of(node.args[0]), torch.Tensor)
    return known and (by_method or calls(node, *_SHAPE_ONLY))


def _read_by(node: Node) -> list[Node]:
    """Return the nodes that must be known before this one can be run."""
    if is_size(value_of(node)):
        return []
    if not _reads_shape_only(node):
        return list(node.all_input_nodes)
    found: list[Node] = []
    map_aggregate(
        (node.args[1:], dict(node.kwargs)), lambda leaf: found.append(leaf) if isinstance(leaf, Node) else None
    )
    return found


_ADVICE = {
    "attention_mask": ": pass none where nothing is padded",
    "position_ids": ": pass none where no sequences are packed",
}


def _refuse_data(node: Node) -> None:
    """Raise for a node that is data, or runs something that is not plain torch."""
    if is_size(value_of(node)):
        return
    if node.op == "placeholder":
        name = _name_of_input(node)
        raise Refused(f"the mask depends on {name}{_ADVICE.get(name, ', which may be another one in every step')}")
    if node.op == "get_attr":
        raise Refused(f"the mask depends on the constant {node.target}")
    if value_of(node) is None:
        raise Refused(f"nothing is known about {describe(node)}, of which the mask is computed")
    target, module = node.target, str(getattr(node.target, "__module__", None) or "torch")
    plain = node.op == "call_method" or (
        node.op == "call_function"
        and not isinstance(target, HigherOrderOperator)
        and (module.partition(".")[0] in ("_operator", "math", "torch"))
        and not any(part in module for part in ("functorch", "distributed", "_dynamo"))
    )
    if not plain:
        raise Refused(f"the mask is computed with {describe(node)}, which is not run beforehand")


def _name_of_input(node: Node) -> str:
    source = dynamo_source(node)
    text = str(source.name if source is not None else node.target)
    # Takes the last key or attribute: L['kwargs']['attention_mask'].
    return text.rstrip("'])").rpartition("'")[2].rpartition(".")[2]


def _only_shapes(node: Node) -> bool:
    """Tell whether the numbers in a call only say what shape it makes."""
    return node.op == "call_method" and node.target in ("expand", "view", "reshape", "unsqueeze")


def _constants(node: Node) -> list[float]:
    """Return the numbers in a call, or in the size that it is; a truth is 1."""
    value = value_of(node)
    if is_size(value):
        return [c for size in sizes_of(value) for c in coefficients(size)]
    found: list[float] = []

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, (int, float)) and math.isfinite(leaf):
            found.append(float(leaf))
        return leaf

    map_aggregate(tuple(operands(node)), keep)
    return found
