"""Averaging of dense gradients: buckets, dtypes, accumulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from hecate.passes.base import PassContext
from hecate.passes.final.in_flight import in_flight
from hecate.passes.final.node_cost import Clock
from hecate.passes.final.split_collectives import split_collectives
from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import SINGLE, World
from hecate.runtime.ops.gradients import (
    GradientSync,
    ReplicatedParameter,
    add_replicated,
    replicate,
    replicate_bucket,
)
from hecate.training.outside_gradients import OutsideGradients
from tests.support.threads import on_each_rank, on_threads


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2, 2))


def _gradient(rank: int, size: int) -> torch.Tensor:
    return torch.arange(float(size)) + 10 * rank


@on_each_rank
def test_bucket_averages_over_ranks(world: World) -> None:
    sync, model = GradientSync(world), Two()
    records = [add_replicated(model, key, sync) for key in ("a", "b")]
    a, b = replicate_bucket([model.a, model.b], [record.id for record in records])
    (a * _gradient(world.rank, 3)).sum().add((b.flatten() * _gradient(world.rank, 4)).sum()).backward()
    assert torch.equal(model.a.grad, _gradient(1, 3))
    assert torch.equal(model.b.grad, _gradient(1, 4).view(2, 2))
    assert [records[0].take_averaged() for _ in range(2)] == [True, False]


def test_every_mean_begins_where_compiled_kernels_may_read_a_vector() -> None:
    """Inductor's kernels for GPUs assume 16 bytes, since the operator's fake returns tensors of their own."""
    shapes = ((3,), (), (2, 5), (8,), (0,), (1,))

    def check(world: World) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_of(dtype, world)

    def check_of(dtype: torch.dtype, world: World) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])
        sync = GradientSync(world)
        records = [add_replicated(model, str(key), sync) for key in range(len(model))]
        grads = [torch.full_like(one, world.rank + 1.0) for one in model]
        means = torch.ops.hecate.average_gradients(grads, [record.id for record in records])
        assert all(mean.data_ptr() % 16 == 0 for mean in means if mean.numel())
        assert all(torch.equal(mean, torch.full_like(mean, 2.0)) for mean in means)

    on_threads(check)


HALF, BRAIN, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
TRAVELS = [
    (BRAIN, None, FLOAT),
    (HALF, None, FLOAT),
    (FLOAT, None, FLOAT),
    (DOUBLE, None, DOUBLE),
    (BRAIN, BRAIN, BRAIN),
    (FLOAT, BRAIN, BRAIN),
]


@pytest.mark.parametrize(("own", "chosen", "travels"), TRAVELS)
@pytest.mark.parametrize("outside", [False, True])
def test_gradients_of_two_bytes_are_added_up_in_float32(
    own: torch.dtype, chosen: torch.dtype | None, travels: torch.dtype, outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user chose a dtype, in graphs and outside of them."""
    plain, found = collectives.all_reduce, []

    def noted(tensor: torch.Tensor, world: World) -> None:
        found.append(tensor.dtype)
        plain(tensor, world)

    monkeypatch.setattr(collectives, "all_reduce", noted)

    def check(world: World) -> None:
        sync, model = GradientSync(world, dtype=chosen), nn.ParameterList([nn.Parameter(torch.zeros(5, dtype=own))])
        mean = torch.full((5,), 1.0 if world.rank == 0 else 2.0**-8, dtype=own)
        if outside:
            OutsideGradients(sync)._average_bucket([mean])
        else:
            record = add_replicated(model, "0", sync)
            (mean,) = torch.ops.hecate.average_gradients([mean], [record.id])
        # What is added up in two bytes may lose both of the small ones.
        expected = torch.full((5,), (1 + 2.0**-7) / 3, dtype=own)
        torch.testing.assert_close(mean, expected, rtol=0 if travels.itemsize > 2 else 2**-7, atol=0)

    on_threads(check)
    assert found == [travels] * 3


@pytest.mark.parametrize("chosen", [None, torch.bfloat16])
def test_the_bytes_that_travel_are_predicted(chosen: torch.dtype | None) -> None:
    """One number of two bytes is four bytes to send, or two, and as many in the buffer beside the mean."""
    two = replace(SINGLE, size=2)
    record = add_replicated(nn.Linear(4, 2, bias=False), "weight", GradientSync(two, dtype=chosen))
    ops, grad, context = torch.ops.hecate, torch.zeros(2, 4, dtype=torch.bfloat16), PassContext(world_size=2)
    gm = make_fx(lambda grad: ops.average_gradients([grad], [record.id]), tracing_mode="fake")(grad)
    split_collectives(gm, context)
    (one,) = in_flight(list(gm.graph.nodes))
    clock, travels = Clock(gm, context), 8 * (4 if chosen is None else 2)
    # In a ring of two: half there, and half back.
    assert clock.sent_bytes(one.start, one.wait) == 2 * travels / 2
    assert clock.bytes_in_flight(one.start, one.wait) == travels + 8 * 2


@on_each_rank
def test_a_mean_of_float16_does_not_overflow_on_its_way(world: World) -> None:
    sync, model = (
        GradientSync(world, dtype=torch.float16),
        nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=torch.float16))]),
    )
    record = add_replicated(model, "0", sync)
    (mean,) = torch.ops.hecate.average_gradients([torch.full((4,), 40_000.0, dtype=torch.float16)], [record.id])
    assert torch.allclose(mean, torch.full_like(mean, 40_000.0), rtol=1e-3)
    outside = torch.full((4,), 40_000.0, dtype=torch.float16)
    OutsideGradients(sync)._average_bucket([outside])
    assert torch.equal(outside, mean)


def _follow(record: ReplicatedParameter) -> None:
    """Tell the record of gradients that arrive, as ``OutsideGradients`` does."""

    def arrived(grad: torch.Tensor) -> None:
        record.take_averaged()

    record.parameter.register_hook(arrived)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_each_rank
def test_accumulation_averages_what_was_left_local(set_to_none: bool, world: World) -> None:
    """Two windows of three micro-batches, cleared between in either way."""
    sync, model = GradientSync(world), Two()
    record = add_replicated(model, "a", sync)
    _follow(record)
    for _ in range(2):
        model.zero_grad(set_to_none)
        for micro, enabled in enumerate((False, False, True)):
            sync.switches.enabled, sync.switches.owed = enabled, True
            (replicate(model.a, record.id) * _gradient(world.rank, 3) * (micro + 1)).sum().backward()
            if not enabled:
                local = _gradient(world.rank, 3) * sum(range(1, micro + 2))
                assert torch.equal(model.a.grad, local)
        assert torch.equal(model.a.grad, _gradient(1, 3) * 6)


@on_each_rank
def test_accumulation_follows_a_replaced_parameter(world: World) -> None:
    sync, model = GradientSync(world), Two()
    record = add_replicated(model, "a", sync)
    model.load_state_dict({"a": torch.ones(3), "b": torch.ones(2, 2)}, assign=True)
    _follow(record)
    for enabled in (False, True):
        sync.switches.enabled, sync.switches.owed = enabled, True
        (replicate(model.a, record.id) * _gradient(world.rank, 3)).sum().backward()
    assert torch.equal(model.a.grad, _gradient(1, 3) * 2)
