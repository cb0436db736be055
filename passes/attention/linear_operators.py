"""Operators with which a mask may be computed: linear in positions, so that small sizes tell of large ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hecate.passes.base import Refused
from hecate.private import TorchDispatchMode, schema_of

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
