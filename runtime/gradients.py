"""Averaging the gradients of replicated parameters over ranks.

A parameter is read through :func:`replicate`, an identity whose backward is an all-reduce. So the
gradients are averaged inside the graph, and no DDP wrapper is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hecate.runtime.world import World


@dataclass
class GradientSync:
    """What all replicated parameters of one model share.

    Attributes:
        enabled: off between the micro-batches of an accumulation.
        dtype: dtype of the all-reduce, None for the gradient's own.
        owed: some gradients were left unaveraged in ``param.grad``; the next all-reduce takes them along.
    """

    world: World
    dtype: torch.dtype | None = None
    enabled: bool = True
    owed: bool = False


@dataclass(frozen=True)
class _Replica:
    """One replicated parameter. The reference is weak: the registry must not keep a model alive."""

    parameter: weakref.ref[Tensor]
    sync: GradientSync


_replicas: dict[int, _Replica] = {}


def add_replica(parameter: Tensor, sync: GradientSync) -> int:
    """Register a replicated parameter and return the id that goes into the graph."""
    id = len(_replicas)
    _replicas[id] = _Replica(weakref.ref(parameter), sync)
    return id


def _average_gradients(grads: Sequence[Tensor], replicas: Sequence[int]) -> list[Tensor]:
    """Average one bucket over ranks in a single all-reduce.

    With synchronization off the gradients pass through and accumulate in ``param.grad``. The next
    averaged bucket takes that local sum along: it adds ``param.grad`` to its own gradient, clears it,
    and averages the total. Averaging is idempotent, so gradients that were averaged earlier stay right.
    """
    records = [_replicas[id] for id in replicas]
    sync = records[0].sync
    if not sync.enabled:
        return [grad.clone() for grad in grads]
    dtype = sync.dtype or grads[0].dtype
    buffer = torch.empty(sum(grad.numel() for grad in grads), dtype=dtype, device=grads[0].device)
    parts = [
        part.view(grad.shape)
        for part, grad in zip(buffer.split([grad.numel() for grad in grads]), grads, strict=True)
    ]
    torch._foreach_copy_(parts, list(grads))
    if sync.owed:
        for part, record in zip(parts, records, strict=True):
            parameter = record.parameter()
            if parameter is not None and parameter.grad is not None:
                part += parameter.grad
                parameter.grad.zero_()
    if sync.world.group is not None:
        dist.all_reduce(buffer, group=sync.world.group)
    buffer.div_(sync.world.size)
    if dtype == grads[0].dtype:
        return parts
    return [part.to(grads[0].dtype) for part in parts]


def _average_gradients_fake(grads: Sequence[Tensor], replicas: Sequence[int]) -> list[Tensor]:
    return [torch.empty_like(grad, memory_format=torch.contiguous_format) for grad in grads]


_lib = torch.library.Library("hecate", "FRAGMENT")
_lib.define("average_gradients(Tensor[] grads, int[] replicas) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("average_gradients", _average_gradients, "CompositeExplicitAutograd")
torch.library.register_fake("hecate::average_gradients", _average_gradients_fake, lib=_lib)


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicas: tuple[int, ...], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        averaged = torch.ops.hecate.average_gradients([grad.contiguous() for grad in grads], list(ctx.replicas))
        return None, *averaged


@torch.compiler.allow_in_graph
def replicate(parameter: Tensor, replica: int) -> Tensor:
    """The parameter itself; its gradient is averaged over ranks."""
    return _Replicate.apply((replica,), parameter)[0]


@torch.compiler.allow_in_graph
def replicate_bucket(parameters: list[Tensor], replicas: list[int]) -> tuple[Tensor, ...]:
    """:func:`replicate` for several parameters of one dtype: one all-reduce when all their gradients are there."""
    return _Replicate.apply(tuple(replicas), *parameters)
