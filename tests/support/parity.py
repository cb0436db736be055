"""Compare a compiled model with one process on the same global batch: the loss and every gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hecate
from hecate.runtime.ops import registration
from hecate.runtime.placement.planner import Rates
from hecate.wrap.shard import shard_of


@dataclass(frozen=True)
class Difference:
    """Errors of one step.

    Attributes:
        loss: relative error of the loss, averaged over ranks.
        gradient: the worst error of any gradient element, relative to the largest element of that gradient.
        worst: name of that parameter.
    """

    loss: float
    gradient: float
    worst: str


def compiled_on_free_links(model: nn.Module, *, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Compiled for links so fast, beside slow matmuls, that every step has replicas."""
    rates = Rates(flops=1e9, rank_bytes=1e12, node_bytes=1e12)
    config = hecate.Config(**({"backend": "aot_eager", "rates": rates} | options))
    return hecate.compile(model, config, mesh=mesh)


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def run_step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Forward and backward on this rank's part of the global batch; returns the local loss."""
    rank, size = rank_and_size()
    mine = ids.chunk(size)[rank]
    loss = model(input_ids=mine, labels=mine)["loss"]
    loss.backward()
    return loss.detach()


def step_and_compare(model: nn.Module, reference: nn.Module, ids: torch.Tensor) -> Difference:
    """One forward and backward of both models from cleared gradients, and how they differ."""
    clear_gradients(model, reference)
    loss = run_step(model, ids)
    expected = reference(input_ids=ids, labels=ids)["loss"]
    expected.backward()
    return compare(model, loss, reference, expected.detach())


def step_both(model: nn.Module, reference: nn.Module, ids: torch.Tensor) -> float:
    """One forward and backward of both models from cleared gradients; the error of the loss, averaged over ranks."""
    clear_gradients(model, reference)
    loss, expected = run_step(model, ids), reference(input_ids=ids, labels=ids)["loss"]
    expected.backward()
    if dist.is_initialized():
        dist.all_reduce(loss)
    return error_of(loss / rank_and_size()[1], expected.detach())


def train_both(
    model: nn.Module, reference: nn.Module, optimizers: Iterable[torch.optim.Optimizer], ids: torch.Tensor
) -> Difference:
    """Take a step with both models; return how far their losses and gradients are apart."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss, expected = run_step(model, ids), reference(input_ids=ids, labels=ids)["loss"]
    expected.backward()
    found = compare(model, loss, reference, expected.detach())
    for optimizer in optimizers:
        optimizer.step()
    return found


def compare(
    model: nn.Module, loss: torch.Tensor, reference: nn.Module, reference_loss: torch.Tensor, *, smallest: float = 0.0
) -> Difference:
    """Errors of ``model``, whose parameters are sharded, against the unsharded ``reference``.

    A parameter without a gradient where the reference has one, or the reverse, is an infinite error. One that is zero
    but for rounding has no relative error: elements under ``smallest`` times the largest of all count as that.
    """
    _, size = rank_and_size()
    mean = loss.float().clone()
    if size > 1:
        dist.all_reduce(mean)
        mean /= size
    expected = dict(reference.named_parameters())
    worst, name_of_worst, least = 0.0, "", 0.0
    if smallest:
        least = smallest * max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        error = _error(parameter, expected[name], least)
        if error > worst:
            worst, name_of_worst = error, name
    return Difference(_or_infinite((mean - reference_loss).abs() / reference_loss.abs()), worst, name_of_worst)


def _error(parameter: nn.Parameter, reference: nn.Parameter, least: float) -> float:
    if parameter.grad is None or reference.grad is None:
        return 0.0 if parameter.grad is None and reference.grad is None else float("inf")
    expected, largest = reference.grad, max(least, float(reference.grad.abs().max()))
    shard = shard_of(parameter)
    if shard is not None:
        expected = shard.slice(expected)
    if parameter.grad.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    error = _or_infinite((parameter.grad.float() - expected.float()).abs().max())
    return error / largest if largest > 0 else (0.0 if error == 0 else float("inf"))


def _or_infinite(error: torch.Tensor) -> float:
    """NaN compares as smaller than everything, so it must not get into a maximum."""
    return float(error) if bool(error.isfinite()) else float("inf")


def error_of(ours: torch.Tensor, theirs: torch.Tensor, *, relative: bool = False) -> float:
    """The largest difference of two tensors, or relative to the largest element; infinite if it is not finite."""
    error = (ours - theirs).abs().max()
    return _or_infinite(error / theirs.abs().max().clamp_min(1e-12) if relative else error)


def state_error(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, relative: bool = False
) -> float:
    """The worst :func:`error_of` of two state dicts' floating-point tensors."""
    names = [name for name, value in theirs.items() if value.is_floating_point()]
    return max(error_of(ours[name], theirs[name], relative=relative) for name in names)


def clear_gradients(*models: nn.Module) -> None:
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None


@contextmanager
def dense_gathers() -> Iterator[list[torch.dtype]]:
    """The dtype of every all-gather of dense parameters inside the block."""
    seen: list[torch.dtype] = []
    original = registration.begin

    def begin(prepare: Any, args: Any, note: str) -> int:
        if note.split()[1] == "gather_dense":
            shards, _, dtype = args
            seen.append(dtype or shards[0].dtype)
        return original(prepare, args, note)

    registration.begin = begin
    try:
        yield seen
    finally:
        registration.begin = original
