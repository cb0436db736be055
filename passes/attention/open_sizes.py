"""Sizes that a graph leaves open: symbols, numbers, values for them; and operators that are linear in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch

from hecate.passes.base import Refused
from hecate.private import TorchDispatchMode, schema_of

# Most elements of a mask that is computed at all, in some seconds.
MOST = 2**32


def is_size(value: Any) -> bool:
    """Tell whether a value is a size or some sizes, which the graph knows in terms of its open sizes."""
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(map(is_size, value))
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def sizes_of(value: Any) -> Iterable[Any]:
    if isinstance(value, torch.Tensor):
        return value.shape
    return value if isinstance(value, (tuple, list)) else [value]


def symbols_in(size: Any) -> set[sympy.Symbol]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def coefficients(size: Any) -> list[float]:
    """Return the numbers in a size, which must be linear in the open sizes."""
    if not symbols_in(size):
        return []
    expr = size.node.expr
    try:
        terms = sympy.Poly(expr, *expr.free_symbols)
    except sympy.PolynomialError:
        terms = None
    if terms is None or terms.total_degree() > 1:
        raise Refused(f"the mask is computed with the size {expr}, and may differ at lengths never tried")
    return [float(c) for c in terms.coeffs()]


def solve(wanted: Iterable[tuple[int | torch.SymInt, int]]) -> dict[sympy.Symbol, int]:
    """Return the open sizes for which each size has its wanted number."""
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


def as_number(size: Any, numbers: Mapping[sympy.Symbol, int]) -> Any:
    """Return sizes as numbers, once the open ones are chosen."""
    if isinstance(size, (tuple, list)):
        return tuple(as_number(each, numbers) for each in size)
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = size.node.expr.subs(numbers)
    if not value.is_Integer:
        raise Refused(f"the mask is computed with the size {size}, which is none of its own")
    return int(value)


def limits(size: int | torch.SymInt) -> tuple[int, int]:
    """Return the smallest and the largest number that a size can be in its graph."""
    if not isinstance(size, torch.SymInt):
        return int(size), int(size)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    lower, upper = (int(b) if isinstance(b, sympy.Integer) else None for b in (bounds.lower, bounds.upper))
    return max(1, lower or 1), MOST if upper is None else upper


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Tell whether two sizes are equal whatever the open ones are."""
    exprs = [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in (a, b)]
    return bool(exprs[0] == exprs[1])


# --- operators with which a mask may be computed: linear in positions, so that small sizes tell of large ones ---

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
# Dtypes that hold every whole number that a position or a count can be.
_WIDE = frozenset((torch.bool, torch.int32, torch.int64, torch.float32, torch.float64))
_KEEP_ROWS = frozenset(("expand", "unsqueeze", "alias", "detach", "_to_copy"))


class Watch(TorchDispatchMode):
    """Sees every ATen operator that a cone runs, and refuses those that must not be run, or say too little.

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
        name = str(schema_of(func).name).partition("::")[2]
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
        apart = torch.Tag.pointwise in func.tags or name in _KEEP_ROWS
        if self.by_rows and not (results[0].shape == args[0].shape if name == "slice" else apart):
            raise Refused(f"{name}, but is too large for that")
        self.sums += name in _SUMS and all(isinstance(operand, torch.Tensor) for operand in args[:2])
        if self.beyond is None and not linear:
            self.beyond = name
        if self.beyond is None and any(value.dtype not in _WIDE for value in results):
            self.beyond = f"{results[0].dtype}"
        return out


def _is_linear(name: str, args: Any, options: Mapping[str, Any], results: list[torch.Tensor]) -> bool:
    """Tell whether a call of an operator in ``_LINEAR`` is no product, no quotient and no remainder in disguise."""
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
