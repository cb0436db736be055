"""What an attention mask says, found out by computing it.

The *cone* of a mask is all that it is computed from. Where that is sizes and constants alone, the mask is the same in
every step, and running its nodes shows it, however a library spells it:

    queries = arange(s) ... le = keys <= queries ... mask = le.expand(2, 1, s, s)    at s = 3    1 0 0
                                                                                                 1 1 0
                                                                                                 1 1 1

Sizes that the graph leaves open are chosen by whoever asks. What some sizes show holds for all others only as far as
the operators allow it: :meth:`MaskCone.reach` says how far one has to look. Fixed sizes are run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hecate.passes.base import Refused
from hecate.passes.captured.torch_values import GraphFacts, value_of
from hecate.passes.fx import arg, calls, describe, operands

# Elements: of a value that is computed in one piece, and of a mask that is computed at all (some seconds).
PIECE, MOST = 2**24, 2**32

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(eq=False)
class Scope:
    """A graph, and where its arguments come from: a checkpointed layer's body is called by the graph around it."""

    gm: GraphModule
    call: Node | None = None
    outer: Scope | None = None
    facts: GraphFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = GraphFacts(self.gm.graph)

    def bodies(self) -> Iterator[Scope]:
        """The bodies of checkpointed layers, and those inside them."""
        sites: dict[str, list[Node]] = {}
        for node in self.gm.graph.nodes:
            if calls(node, _CHECKPOINT):
                sites.setdefault(str(arg(node, 0).target), []).append(node)
        for name, (call, *others) in sites.items():
            body = getattr(self.gm, name, None)
            # Of a body with several callers no argument is known.
            if isinstance(body, GraphModule) and not others:
                inner = Scope(body, call, self)
                yield inner
                yield from inner.bodies()

    def resolve(self, value: Node) -> tuple[Scope, Node]:
        """The graph that computes a value, and the value in it; for an argument these are the caller's."""
        if value.op != "placeholder" or self.call is None or self.outer is None:
            return self, value
        names = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        passed = self.call.args[1:]
        source = passed[names.index(value)] if len(names) == len(passed) else None
        return self.outer.resolve(source) if isinstance(source, Node) else (self, value)


class MaskCone:
    """The nodes that compute one mask, ready to be run.

    Attributes:
        batch, queries, keys: the mask's sizes in the graph, numbers or SymInts; ``batch`` is 1 for a mask without.
        is_fixed: the graph leaves no size open.
    """

    def __init__(self, mask: Node, scope: Scope) -> None:
        """Collect the cone.

        Raises:
            Refused: it holds data, not only sizes and constants, or something that must not be run.
        """
        value = value_of(mask)
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            raise Refused("the mask is no tensor of queries and keys")
        self.mask = mask
        self.batch, self.queries, self.keys = value.shape[0] if value.ndim > 2 else 1, *value.shape[-2:]
        self._order: list[Node] = []
        self._alias: dict[Node, Node] = {}
        self._members: dict[Scope, list[Node]] = {}
        self._collect(scope)
        self.is_fixed = not any(_symbols(size) for node in self._order for size in _sizes_of(value_of(node)))
        self._watch = _Watch()

    def refuse_changes(self, scope: Scope, argument: Node, *, until: Node) -> None:
        """Raise if something changes the mask in place before ``until``, a node of ``scope`` that has it as argument.

        Raises:
            Refused: names the operation.
        """
        here, point, values = scope, until, [argument, *self._members.get(scope, [])]
        while True:
            if values:
                here.facts.refuse_changes_of(values, until=point)
            if here.outer is None or here.call is None:
                return
            point = here.call
            here = here.outer
            values = self._members.get(here, [])

    def reach(self) -> int:
        """How large open sizes must be tried, so that nothing new can come beyond.

        The values of a cone are linear in positions and sizes except at breaks: it may only add, compare, select and
        move positions, and count truths. Breaks lie no farther out than sums of its constants, twice as far for every
        addition of two of its values. Asked right after the mask was run at small sizes, which shows the operators.

        Raises:
            Refused: an operator does more than that, such as a division, or a type has too few digits.
        """
        if self._watch.beyond is not None:
            raise Refused(f"the mask is computed with {self._watch.beyond}, and may differ at lengths never tried")
        for node in self._order:
            for size in _sizes_of(value_of(node)):
                _coefficients(size)
        # Of a fixed length the pattern is seen whole.
        fixed = {size for size in (self.queries, self.keys) if not _symbols(size)}
        shapes = {c for node in self._order if _only_shapes(node) for c in _constants(node)} - fixed
        others = [c for node in self._order if not _only_shapes(node) for c in _constants(node) if c not in fixed]
        return 2 * math.ceil(sum(max(1, abs(c)) for c in (*shapes, *others))) * 2**self._watch.sums + 8

    def evaluate(self, batch: int, queries: int, keys: int) -> torch.Tensor:
        """The mask at these sizes, on the CPU.

        Raises:
            Refused: as :meth:`rows`.
        """
        return torch.cat([rows for _, rows in reversed(list(self.rows(batch, queries, keys)))], dim=-2)

    def rows(self, batch: int, queries: int, keys: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The mask at these sizes in blocks of queries, from the last to the first, each with its first query.

        Raises:
            Refused: the graph has another size, or the mask cannot be computed.
        """
        numbers = _solve([(self.batch, batch), (self.queries, queries), (self.keys, keys)])
        shapes = {
            node: _number(tuple(value.shape), numbers)
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
            elif any(source in large for source in self._sources(node)):
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

    def _sources(self, node: Node) -> list[Node]:
        return [self._alias.get(source, source) for source in _read_by(node)]

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
        if _is_size(value_of(node)):
            return _number(value_of(node), numbers)
        if _reads_shape_only(node):
            like = value_of(node.args[0])
            # One element in memory: whoever reads the shape reads nothing else.
            values[node] = torch.zeros((), dtype=like.dtype).expand(_number(tuple(like.shape), numbers))
        return self._call(node, *self._arguments(node, values))

    def _run_rows(
        self, node: Node, block: Mapping[Node, Any], shape: tuple[int, ...], queries: int, count: int
    ) -> Any:
        """Some rows of a large value: fine where every row is computed from the same row of what is large."""
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
            with _disable_current_modes(), torch.device("cpu"), torch.no_grad(), self._watch:
                return target(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)
        except Refused as refused:
            raise Refused(f"the mask is computed with {refused}: {describe(node)}") from None
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Refused(f"the mask cannot be computed beforehand: {describe(node)}: {first}") from error


# Sums, comparisons, selections and moves of positions; some only as _is_linear says.
_LINEAR = frozenset((
    "arange", "full", "ones", "zeros", "new_full", "new_ones", "new_zeros", "full_like", "ones_like", "zeros_like",
    "scalar_tensor", "lift_fresh", "lift_fresh_copy", "add", "sub", "rsub", "neg", "abs", "eq", "ne", "lt", "le",
    "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_and", "logical_or", "logical_xor",
    "logical_not", "minimum", "maximum", "clamp", "where", "masked_fill", "tril", "triu", "expand", "view", "reshape",
    "_unsafe_view", "unsqueeze", "squeeze", "slice", "select", "permute", "transpose", "t", "alias", "detach",
    "clone", "_to_copy", "cat", "stack", "index", "index_select", "gather", "cumsum",
))  # fmt: skip
_SUMS = ("add", "sub", "rsub")
# Whose results hold every whole number that a position or a count can be.
_WIDE = frozenset((torch.bool, torch.int32, torch.int64, torch.float32, torch.float64))
_KEEP_ROWS = frozenset(("expand", "unsqueeze", "alias", "detach", "_to_copy"))


class _Watch(TorchDispatchMode):
    """Sees every ATen operator that a cone runs, and refuses what must not be run, or says too little.

    Attributes:
        by_rows: a block of rows is being computed, so nothing may look at other rows.
        sums: how many additions of two values were seen since it was set to 0.
        beyond: the first thing seen that is not linear in positions, or has too few digits for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_rows = False
        self.sums = 0
        self.beyond: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func._schema.name).partition("::")[2]
        if func.namespace not in ("aten", "prims"):
            raise Refused(f"an operator of {func.namespace}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused("random numbers")
        if "empty" in name:
            raise Refused("empty memory")
        options = kwargs or {}
        out = func(*args, **options)
        results = [v for v in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(v, torch.Tensor)]
        linear = name in _LINEAR and _is_linear(name, args, options, results)
        if not linear and any(value.is_floating_point() for value in results):
            raise Refused(f"fractions by {name}, which another device may round differently")
        if self.by_rows and not self._keeps_rows(func, name, args, results):
            raise Refused(f"{name}, but is too large for that")
        self.sums += name in _SUMS and all(isinstance(operand, torch.Tensor) for operand in args[:2])
        if self.beyond is None and not linear:
            self.beyond = name
        if self.beyond is None and any(value.dtype not in _WIDE for value in results):
            self.beyond = f"{results[0].dtype}"
        return out

    def _keeps_rows(self, func: Any, name: str, args: Any, results: list[torch.Tensor]) -> bool:
        if name == "slice":
            return bool(results[0].shape == args[0].shape)
        return torch.Tag.pointwise in func.tags or name in _KEEP_ROWS


def _is_linear(name: str, args: Any, options: Mapping[str, Any], results: list[torch.Tensor]) -> bool:
    """What else is asked of operators in ``_LINEAR``: no product, no quotient and no remainder in disguise."""
    if name == "cumsum":
        return bool(args[0].dtype is torch.bool)
    if name in _SUMS:
        return bool(options.get("alpha", 1) == 1)
    if name.startswith("bitwise"):
        return results[0].dtype is torch.bool
    if name in ("view", "reshape", "_unsafe_view"):
        # Joined dimensions count in steps of the second one.
        return [n for n in args[0].shape if n != 1] == [n for n in results[0].shape if n != 1]
    return True


def _rows_of(value: Any, queries: int, first: int, count: int) -> Any:
    """The rows of what is broadcast to a large value: its dimensions line up from the right, queries next to last."""
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[-2] == queries:
        return value.narrow(-2, first, count)
    return value


# --- what a node is ---


_SHAPE_ONLY_METHODS = ("new_full", "new_ones", "new_zeros")
_SHAPE_ONLY = (torch.full_like, torch.ones_like, torch.zeros_like)


def _reads_shape_only(node: Node) -> bool:
    """Whether a call uses nothing of its first operand but the shape, type and device."""
    by_method = node.op == "call_method" and node.target in _SHAPE_ONLY_METHODS
    known = bool(node.args) and isinstance(value_of(node.args[0]), torch.Tensor)
    return known and (by_method or calls(node, *_SHAPE_ONLY))


def _read_by(node: Node) -> list[Node]:
    """The nodes that must be known before this one can be run."""
    if _is_size(value_of(node)):
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
    if _is_size(value_of(node)):
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
        and not isinstance(target, torch._ops.HigherOrderOperator)
        and (module.partition(".")[0] in ("_operator", "math", "torch"))
        and not any(part in module for part in ("functorch", "distributed", "_dynamo"))
    )
    if not plain:
        raise Refused(f"the mask is computed with {describe(node)}, which is not run beforehand")


def _name_of_input(node: Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    text = str(source.name if source is not None else node.target)
    # The last key or attribute: L['kwargs']['attention_mask'].
    return text.rstrip("'])").rpartition("'")[2].rpartition(".")[2]


# --- sizes ---


def _is_size(value: Any) -> bool:
    """Whether a value is a size or some of them, which the graph knows in terms of its open sizes."""
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(map(_is_size, value))
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _sizes_of(value: Any) -> Iterable[Any]:
    if isinstance(value, torch.Tensor):
        return value.shape
    return value if isinstance(value, (tuple, list)) else [value]


def _symbols(size: Any) -> set[sympy.Symbol]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _only_shapes(node: Node) -> bool:
    """Whether the numbers in a call only say what shape it makes."""
    return node.op == "call_method" and node.target in ("expand", "view", "reshape", "unsqueeze")


def _constants(node: Node) -> list[float]:
    """The numbers in a call, or in the size that it is; a truth is 1."""
    value = value_of(node)
    if _is_size(value):
        return [c for size in _sizes_of(value) for c in _coefficients(size)]
    found: list[float] = []

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, (int, float)) and math.isfinite(leaf):
            found.append(float(leaf))
        return leaf

    map_aggregate(tuple(operands(node)), keep)
    return found


def _coefficients(size: Any) -> list[float]:
    """The numbers in a size, of which open ones must be linear in what is open."""
    if not _symbols(size):
        return []
    expr = size.node.expr
    try:
        terms = sympy.Poly(expr, *expr.free_symbols)
    except sympy.PolynomialError:
        terms = None
    if terms is None or terms.total_degree() > 1:
        raise Refused(f"the mask is computed with the size {expr}, and may differ at lengths never tried")
    return [float(c) for c in terms.coeffs()]


def _solve(wanted: Iterable[tuple[int | torch.SymInt, int]]) -> dict[sympy.Symbol, int]:
    """The open sizes for which sizes are what is wanted of them."""
    found: dict[sympy.Symbol, int] = {}
    for size, number in wanted:
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        symbols = expr.free_symbols
        if not symbols:
            fits = int(expr) == number
        elif len(symbols) == 1:
            (symbol,) = symbols
            offset = expr.subs(symbol, 0)
            value = number - offset
            fits = expr == symbol + offset and value >= 0 and found.setdefault(symbol, int(value)) == value
        else:
            fits = False
        if not fits:
            raise Refused(f"the mask cannot have a size of {number} where the graph has {expr}")
    return found


def _number(size: Any, numbers: Mapping[sympy.Symbol, int]) -> Any:
    """Sizes as numbers, once the open ones are chosen."""
    if isinstance(size, (tuple, list)):
        return tuple(_number(each, numbers) for each in size)
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.expr.subs(numbers)
    if not value.is_Integer:
        raise Refused(f"the mask is computed with the size {size}, which is none of its own")
    return int(value)


def limits(size: int | torch.SymInt) -> tuple[int, int]:
    """The smallest and the largest number that a size can be in its graph."""
    if not isinstance(size, torch.SymInt):
        return int(size), int(size)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    lower, upper = (int(b) if isinstance(b, sympy.Integer) else None for b in (bounds.lower, bounds.upper))
    return max(1, lower or 1), MOST if upper is None else upper


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal whatever the open ones are."""
    exprs = [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in (a, b)]
    return bool(exprs[0] == exprs[1])
