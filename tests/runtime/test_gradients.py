"""Averaging of dense gradients: buckets, dtypes, accumulation."""

from __future__ import annotations

import torch

from hecate.runtime.gradients import GradientSync, add_replica, replicate, replicate_bucket
from hecate.runtime.world import SINGLE, World
from tests.threads import on_threads


def _gradient(rank: int, size: int) -> torch.Tensor:
    return torch.arange(float(size)) + 10 * rank


def test_bucket_averages_over_ranks() -> None:
    def check(world: World) -> None:
        sync = GradientSync(world)
        parameters = [torch.zeros(3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
        ids = [add_replica(p, sync) for p in parameters]
        a, b = replicate_bucket(parameters, ids)
        (a * _gradient(world.rank, 3)).sum().add((b.flatten() * _gradient(world.rank, 4)).sum()).backward()
        assert torch.equal(parameters[0].grad, _gradient(1, 3))
        assert torch.equal(parameters[1].grad, _gradient(1, 4).view(2, 2))

    on_threads(check)


def test_accumulation_averages_what_was_left_local() -> None:
    def check(world: World) -> None:
        sync = GradientSync(world)
        parameter = torch.zeros(3, requires_grad=True)
        id = add_replica(parameter, sync)
        for micro, enabled in enumerate((False, False, True)):
            sync.enabled, sync.owed = enabled, True
            (replicate(parameter, id) * _gradient(world.rank, 3) * (micro + 1)).sum().backward()
            if not enabled:
                local = _gradient(world.rank, 3) * sum(range(1, micro + 2))
                assert torch.equal(parameter.grad, local)
        assert torch.equal(parameter.grad, _gradient(1, 3) * 6)

    on_threads(check)


def test_reduce_dtype_keeps_the_gradient_dtype() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    id = add_replica(parameter, GradientSync(SINGLE, dtype=torch.bfloat16))
    (replicate(parameter, id) * torch.tensor([1.0, 2.0, 1.001])).sum().backward()
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [1.0, 2.0, 1.0]


def test_average_gradients_opcheck() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    id = add_replica(parameter, GradientSync(SINGLE))
    torch.library.opcheck(torch.ops.hecate.average_gradients.default, ([torch.randn(3)], [id]))
