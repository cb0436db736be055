"""Clipping and unscaling of gradients of shards: by what one rank's gradients say, ranks would part."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from hecate.private import TOTAL_NORM, UNSCALE
from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.world import World
from hecate.runtime.state.settle import settle_all
from hecate.training.owner_notes import world_of
from hecate.wrap.shard import shard_of, worlds_of_gradients

_local_norm = getattr(clip_grad, TOTAL_NORM)


def watch_clipping() -> None:
    """Make torch's ``clip_grad_norm_`` and ``get_total_norm`` know shards. Further calls change nothing."""
    # clip_grad_norm_ calls this, wherever it was imported to.
    setattr(clip_grad, TOTAL_NORM, _total_norm)
    torch.nn.utils.get_total_norm = _total_norm


@functools.wraps(_local_norm)
def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the norm by torch's function; with gradients of shards over all ranks, in a collective."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    worlds = worlds_of_gradients()
    owned = [tensor for tensor in tensors if id(tensor) in worlds]
    if not owned:
        norm_of = _local_norm if len(_by_kind(tensors)) < 2 else _whole_norm
        return norm_of(tensors, norm_type, error_if_nonfinite, foreach)
    whole = _whole_norm([tensor for tensor in tensors if id(tensor) not in worlds], norm_type, foreach=foreach)
    with doing("clip_grad_norm_"), torch.no_grad():
        norm = _with_owned(whole, owned, float(norm_type), worlds[id(owned[0])], foreach)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return norm


def get_total_norm(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    stages: DeviceMesh | None = None,
) -> torch.Tensor:
    """Return the norm of the gradients of a whole model, on every rank.

    It takes parameters, where torch's function takes gradients, and knows stages of a pipeline. A collective: all
    ranks call it after a backward with gradient synchronization on.

    Args:
        parameters: the compiled model, or parameters, also of several.
        norm_type: order of the norm, greater than 0; may be infinite.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        stages: the dimension of a mesh along which other ranks have the other stages of the model.

    Returns:
        The norm, a float32 scalar.

    Raises:
        TypeError: a tensor is no parameter.
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is NaN or infinite and ``error_if_nonfinite`` is set.
    """
    return _norm_of(_listed(parameters), norm_type, error_if_nonfinite, foreach, stages, "hecate.get_total_norm")


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    stages: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` does, with the norm of the whole model on every rank.

    Torch's own function does the same once a model was compiled, on ranks that have gradients of shards; this one
    works on ranks without any, too. A collective: all ranks call it after a backward with gradient synchronization
    on.

    Args:
        parameters: the compiled model, or its parameters.
        max_norm: the norm after clipping is at most this.
        norm_type: order of the norm, greater than 0; may be infinite.
        error_if_nonfinite: raise instead of scaling by NaN or infinity.
        stages: the dimension of a mesh along which other ranks have the other stages of the model.

    Returns:
        The total norm before clipping, a float32 scalar, the same on every rank.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is NaN or infinite and ``error_if_nonfinite`` is set.
    """
    parameters = _listed(parameters)
    norm = _norm_of(parameters, norm_type, error_if_nonfinite, foreach, stages, "hecate.clip_grad_norm_")
    for same in _by_kind(parameters):
        torch.nn.utils.clip_grads_with_norm_(same, max_norm, norm, foreach=foreach)
    return norm


def _listed(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _norm_of(
    parameters: list[torch.Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    stages: DeviceMesh | None,
    function: str,
) -> torch.Tensor:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"{function}: norm_type must be greater than 0, got {norm_type}")
    if any(not isinstance(p, nn.Parameter) and not p.requires_grad for p in parameters):
        raise TypeError(
            f"{function}: expected the model or its parameters, got a tensor without gradient, perhaps a gradient "
            "itself, as torch.nn.utils.get_total_norm takes"
        )
    shards = [shard for parameter in parameters if (shard := shard_of(parameter)) is not None]
    whole = [p.grad for p in parameters if p.grad is not None and shard_of(p) is None]
    owned = [p.grad for p in parameters if p.grad is not None and shard_of(p) is not None]
    norm = _whole_norm(whole, norm_type, foreach=foreach)
    if shards:
        with doing(function):
            norm = _with_owned(norm, owned, norm_type, shards[0].world, foreach)
    if stages is not None:
        norm = _over_stages(norm, norm_type, stages)
    if error_if_nonfinite:
        _check_finite(norm, norm_type, function)
    return norm


def _over_stages(norm: torch.Tensor, order: float, stages: DeviceMesh) -> torch.Tensor:
    """Return the norm of all stages' gradients from that of this rank's stage. A collective of ``stages``."""
    norm = norm.to(device=stages.device_type, dtype=torch.float32, copy=True)
    if order == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=stages.get_group())
        return norm
    power = norm**order
    dist.all_reduce(power, group=stages.get_group())
    return power ** (1.0 / order)


def _check_finite(norm: torch.Tensor, order: float, function: str = "hecate.clip_grad_norm_") -> None:
    if not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"{function}: the gradient norm of order {order} is {float(norm)}. To clip anyway, "
            "set error_if_nonfinite=False."
        )


def _whole_norm(
    gradients: list[torch.Tensor], order: float, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """Return the norm of gradients that all ranks have alike, DTensors beside tensors: torch takes no two kinds."""
    kinds = _by_kind(gradients)
    if len(kinds) < 2:
        norm = _local_norm(gradients, order, error_if_nonfinite, foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    norms = [_whole_norm(same, order, error_if_nonfinite, foreach) for same in kinds]
    dtype = functools.reduce(torch.promote_types, [norm.dtype for norm in norms])
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, dtype) for norm in norms]), order)


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists that torch's functions take: plain ones, and the DTensors of each mesh."""
    kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def _with_owned(
    whole: torch.Tensor, owned: list[torch.Tensor], order: float, world: World, foreach: bool | None
) -> torch.Tensor:
    """Return the norm of ``whole``, which is equal on all ranks, joined with the gradients of all ranks' shards."""
    own = _local_norm([g for g in owned if g.numel()], order, foreach=foreach)
    own = own.to(device=world.device, dtype=torch.float32)
    whole = whole.to(device=world.device, dtype=torch.float32)
    if order == float("inf"):
        collectives.all_reduce(own, world, dist.ReduceOp.MAX)
        return torch.maximum(own, whole)
    power = own**order
    collectives.all_reduce(power, world)
    norm = (power + whole**order) ** (1.0 / order)
    if world.everyone is not world:
        # Sums of other groups may differ in the last bit, by which twins would part.
        world.everyone.queue.drain()
        collectives.all_reduce(norm, world.everyone, dist.ReduceOp.MAX)
    return norm


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
