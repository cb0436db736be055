"""Sizes that a graph leaves open: their symbols and numbers, and choosing values for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch

from hecate.passes.base import Refused

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
