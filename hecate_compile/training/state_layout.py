"""Which part of an optimizer's state belongs to which row of a parameter: what is moved and saved with that row.

State is like its parameter, or one value for all of it. State of bitsandbytes in eight bits has a byte for each
element, a scale for each block of 256 elements, and tables that are the same everywhere: where rows are of whole
blocks each row has scales of its own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.world import World
from hecate.wrap.expert_shards import is_member_shard
from hecate.wrap.shard import shard_of

_BLOCK = 256
_SCALES = {"absmax1", "absmax2"}
_TABLES = {"qmap1", "qmap2"}


def is_table(key: str) -> bool:
    """Return whether state is a table of values, the same for all parameters."""
    return key in _TABLES


def is_scale(key: str) -> bool:
    """Return whether state is of blocks of elements, whatever shape the parameter has."""
    return key in _SCALES


def is_for_all(key: str, value: torch.Tensor) -> bool:
    """Return whether state is one value, or one table, for a whole parameter."""
    return value.ndim == 0 or is_table(key)


def lines_per_row(key: str, shape: Sequence[int], of: Sequence[int]) -> int | None:
    """Return how many entries of state of a shape belong to each row of a parameter ``of`` a shape, in its order.

    None if rows share entries, or if it cannot be told.

    >>> lines_per_row("exp_avg", [4, 8, 64], [4, 8, 64]), lines_per_row("absmax1", [8], [4, 8, 64])
    (1, 2)
    >>> lines_per_row("absmax1", [4], [4, 5, 50])
    """
    if tuple(shape) == tuple(of):
        return 1
    lines, rest = divmod(math.prod(of[1:]), _BLOCK)
    return lines if is_scale(key) and not rest and tuple(shape) == (of[0] * lines,) else None


def by_row(key: str, value: torch.Tensor, of: Sequence[int]) -> torch.Tensor | None:
    """Return state with a line for each row of a parameter ``of`` a shape; None if it has none."""
    lines = lines_per_row(key, value.shape, of)
    if lines is None:
        return None
    return value if tuple(value.shape) == tuple(of) else value.view(of[0], lines)


def on_rows(key: str, value: Any, of: Sequence[int], function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what ``function`` makes of state by rows, in the state's own form; what has no rows stays as it is."""
    rows = by_row(key, value, of) if isinstance(value, torch.Tensor) and not is_for_all(key, value) else None
    if rows is None:
        return value
    made = function(rows)
    return made if rows is value else made.flatten()


def in_other_forms(optimizer: Optimizer, world: World) -> str | None:
    """Return the name of a parameter whose state ranks keep in different forms; None if there is none. A collective.

    bitsandbytes keeps state of fewer than 4,096 elements in fp32, and ranks have parts of other sizes.
    """
    shards = {p: shard_of(p) for group in optimizer.param_groups for p in group["params"]}
    # All of what an expert of its own has is on its owner.
    names = {
        p: shard.name
        for p, shard in shards.items()
        if shard is not None and shard.world.group is not None and not is_member_shard(shard)
    }
    if not names:
        return None
    forms = [
        sorted((key, str(getattr(value, "dtype", ""))) for key, value in optimizer.state.get(parameter, {}).items())
        for parameter in names
    ]
    codes = torch.tensor([zlib.crc32(repr(form).encode()) for form in forms], device=world.control_device)
    most = torch.stack([codes, -codes])
    world.queue.drain()
    with doing("a comparison of the optimizer's state"):
        collectives.all_reduce(most, world, dist.ReduceOp.MAX)
    different = (most[0] != -most[1]).nonzero().flatten().tolist()
    return list(names.values())[different[0]] if different else None
