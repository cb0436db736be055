"""Warn if an optimizer's groups go wrong because ``hecate.compile`` has stacked parameters of experts in a list."""

from __future__ import annotations

import torch
from torch.optim.optimizer import Optimizer

from hecate.runtime.comm.warn import warn_together
from hecate.wrap.expert_shards import ExpertShard, is_expert_shard
from hecate.wrap.shard import shard_of, shards_with_gradients


def warn_of_decayed_vectors(optimizer: Optimizer) -> None:
    """Warn if weight decay is for some parameters alone, and stacked vectors are among these."""
    decayed: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        decay = group.get("weight_decay")
        if isinstance(decay, (int, float)):
            (decayed if decay else kept).extend(group["params"])
    # Without a vector in it, a group without decay is not meant for vectors.
    if not any(p.ndim < 2 or _stacked_vectors(p) for p in kept):
        return
    shards = [shard for p in decayed if (shard := _stacked_vectors(p)) is not None]
    if not shards:
        return
    names = ", ".join(shard.name for shard in shards[:3]) + (f" and {len(shards) - 3} more" if shards[3:] else "")
    warn_together(
        f"hecate: {type(optimizer).__name__} decays {names}, and not all parameters. These are biases or norms of "
        f"experts in a list, which hecate.compile has stacked: {list(shards[0].full_shape)} has a line for each "
        "expert, and a rule such as `p.dim() >= 2` takes it for a matrix. If they are not to decay, put them by name "
        "into the group without weight decay.",
        shards[0].world.rank,
        stacklevel=5,
    )


def warn_of_empty_groups(optimizer: Optimizer) -> None:
    """Warn if a group has no parameters, and stacked ones that have gradients are in no group."""
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if not empty:
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    shards = [
        shard
        for parameter, shard in shards_with_gradients()
        if id(parameter) not in own and is_expert_shard(shard) and shard.stacked
    ]
    if not shards:
        return
    name, theirs = type(optimizer).__name__, shards[0].name
    warn_together(
        f"hecate: group {empty[0]} of {name} has no parameters, and {theirs}, which has a gradient, is in none of "
        "its groups. Experts of a list have no parameters of their own after hecate.compile: theirs are the rows of "
        f"{theirs} and its like, which are in model.parameters(). What no optimizer has does not train.",
        shards[0].world.rank,
        stacklevel=5,
    )


def _stacked_vectors(parameter: torch.Tensor) -> ExpertShard | None:
    shard = shard_of(parameter)
    return shard if is_expert_shard(shard) and shard.stacked and len(shard.full_shape) == 2 else None
