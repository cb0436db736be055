"""Gradient clipping for a model whose experts are sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from hecate.runtime.comm.world import World
from hecate.wrap.shard import shard_of


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` with the norm of the whole model on every rank.

    The plain function sees another norm on each rank, because each rank has other shards, and would scale
    the parameters apart. A collective: all ranks call it after a backward with gradient
    synchronization on, also ranks without gradients.

    Args:
        parameters: the compiled model, or its parameters.
        max_norm: the norm after clipping is at most this.
        norm_type: order of the norm, greater than 0; may be infinite.
        error_if_nonfinite: raise instead of scaling by NaN or infinity.

    Returns:
        The total norm before clipping, a float32 scalar, the same on every rank.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is NaN or infinite and ``error_if_nonfinite`` is set.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"hecate.clip_grad_norm_: norm_type must be greater than 0, got {norm_type}")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(parameters)
    worlds = [_world_of_shard(p) for p in parameters]
    whole = [p.grad for p, world in zip(parameters, worlds, strict=True) if p.grad is not None and world is None]
    owned = [p.grad for p, world in zip(parameters, worlds, strict=True) if p.grad is not None and world is not None]
    norm = torch.nn.utils.get_total_norm(whole, norm_type, foreach=foreach)
    shared = next((world for world in worlds if world is not None), None)
    if shared is not None:
        norm = _with_owned(norm, owned, norm_type, shared, foreach)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"hecate.clip_grad_norm_: the gradient norm of order {norm_type} is {float(norm)}. To clip anyway, "
            "set error_if_nonfinite=False."
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=foreach)
    return norm


def _world_of_shard(parameter: torch.Tensor) -> World | None:
    """The ranks over which a parameter is sharded; None for one that every rank has whole."""
    shard = shard_of(parameter)
    return shard.world if shard is not None else None


def _with_owned(
    whole: torch.Tensor, owned: list[torch.Tensor], order: float, world: World, foreach: bool | None
) -> torch.Tensor:
    """The norm of replicated gradients, equal on all ranks, joined with those of all ranks' shards."""
    own = torch.nn.utils.get_total_norm([g for g in owned if g.numel()], order, foreach=foreach)
    own = own.to(device=world.device, dtype=torch.float32)
    whole = whole.to(device=world.device, dtype=torch.float32)
    if order == float("inf"):
        if world.group is not None:
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=world.group)
        return torch.maximum(own, whole)
    power = own**order
    if world.group is not None:
        dist.all_reduce(power, group=world.group)
    return (power + whole**order) ** (1.0 / order)
