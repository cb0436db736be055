"""Make torch.amp.GradScaler skip a step on all ranks together: each sees infinities of its own experts alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from hecate.private import UNSCALE
from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import doing
from hecate.runtime.state.settle import settle_all
from hecate.training.optimizer_state import world_of

_unscale_grads = getattr(GradScaler, UNSCALE)


def watch_scalers() -> None:
    """Make every scaler know of the infinities of all ranks. Further calls change nothing."""
    # unscale_ and step both call this method.
    setattr(GradScaler, UNSCALE, _unscale_on_all)


@functools.wraps(_unscale_grads)
def _unscale_on_all(self: Any, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
    """Unscale by torch's method; for an optimizer of shards join what all ranks found, in a collective."""
    # A scaler would take the NaN of a refused step for an overflow, and skip the step in which the optimizer raises.
    settle_all()
    found: dict[torch.device, torch.Tensor] = _unscale_grads(self, optimizer, *args)
    world = world_of(optimizer)
    if world is None:
        return found
    mine = [value.to(world.device) for value in found.values()]
    # A rank without gradients has found nothing, and must still hear.
    total = torch.stack(mine).amax(0) if mine else torch.zeros((), device=world.device)
    with doing("torch.amp.GradScaler"):
        collectives.all_reduce(total, world, dist.ReduceOp.MAX)
    return {world.device: total}
