"""Gathering sharded dense parameters and reducing their gradients: padding, dtypes, one collective per call."""

from __future__ import annotations

import pytest
import torch

from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import SINGLE, World
from hecate.runtime.ops.dense import DENSE_SHARDS, DenseShard, add_dense_shard
from hecate.runtime.ops.gradients import GradientSync
from tests.support.threads import on_each_rank, on_threads

# On three ranks: without padding, with some, and with ranks that hold nothing else.
SHAPES = ((6, 2), (7,), (2, 3), (4, 1, 2))


def _full() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _records(world: World, dtype: torch.dtype | None = None) -> list[DenseShard]:
    sync = GradientSync(world, dtype=dtype)
    return [add_dense_shard(f"p{index}", torch.Size(shape), sync) for index, shape in enumerate(SHAPES)]


def test_shards_are_equal_and_padded_with_zeros() -> None:
    world = World(rank=2, size=3, group=None, device=torch.device("cpu"))
    records = _records(world)
    assert [tuple(record.shape) for record in records] == [(2, 2), (3,), (1, 3), (2, 1, 2)]
    assert [record.counts for record in records] == [[2, 2, 2], [3, 3, 1], [1, 1, 0], [2, 2, 0]]
    full = _full()
    shards = [record.slice(value) for record, value in zip(records, full, strict=True)]
    assert torch.equal(shards[0], full[0][4:])
    assert torch.equal(shards[1], torch.cat([full[1][6:], torch.zeros(2)]))
    assert not shards[2].any() and not shards[3].any()


@pytest.mark.parametrize("count", [1, len(SHAPES)])
@on_each_rank
def test_gather_gives_whole_contiguous_parameters(count: int, world: World) -> None:
    for start in range(len(SHAPES) - count + 1):
        records = _records(world)[start : start + count]
        full = _full()[start : start + count]
        shards = [record.slice(value) for record, value in zip(records, full, strict=True)]
        found = torch.ops.hecate.gather_dense(shards, [record.id for record in records], None)
        for value, expected in zip(found, full, strict=True):
            assert torch.equal(value, expected)
            assert value.is_contiguous()
        memory = [tensor.untyped_storage().data_ptr() for tensor in (*found, *shards)]
        assert len(set(memory)) == len(memory)


@on_each_rank
def test_backward_leaves_each_rank_the_mean_of_its_rows(world: World) -> None:
    records = _records(world)
    shards = [r.slice(value).requires_grad_() for r, value in zip(records, _full(), strict=True)]
    found = torch.ops.hecate.gather_dense(shards, [record.id for record in records], None)
    loss = sum((value * (world.rank + 1) * weight).sum() for value, weight in zip(found, _full(), strict=True))
    loss.backward()
    for shard, record, weight in zip(shards, records, _full(), strict=True):
        torch.testing.assert_close(shard.grad, record.slice(weight * 2))
        assert not shard.grad[record.counts[world.rank] :].any()
        assert record.take_averaged() and not record.take_averaged()


def test_one_collective_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("all_gather_even", "all_to_all"):
        original = getattr(collectives, name)

        def counted(*args: object, name: str = name, original: object = original) -> torch.Tensor:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(collectives, name, counted)

    def check(world: World) -> None:
        records = _records(world)
        shards = [record.slice(value) for record, value in zip(records, _full(), strict=True)]
        ids = [record.id for record in records]
        whole = torch.ops.hecate.gather_dense(shards, ids, None)
        torch.ops.hecate.reduce_scatter_dense(whole, ids, torch.float32)

    on_threads(check)
    assert sorted(calls) == ["all_gather_even"] * 3 + ["all_to_all"] * 3


@on_each_rank
def test_narrow_dtypes_travel_and_are_added_up_in_float32(world: World) -> None:
    """1 + 2^-8 + 2^-8 is 1 in bfloat16, whatever the order; the mean is exact in float32."""
    (record,) = _records(world)[:1]
    full = _full()[0]
    shard = record.slice(full).requires_grad_()
    (value,) = torch.ops.hecate.gather_dense([shard], [record.id], torch.bfloat16)
    assert torch.equal(value, full.bfloat16())
    value.backward(torch.full_like(value, 1.0 if world.rank == 0 else 2.0**-8))
    assert shard.grad.dtype == torch.float32
    assert torch.equal(shard.grad, torch.full_like(shard, (1 + 2.0**-7) / 3))


@on_each_rank
def test_reduce_dtype_is_what_travels(world: World) -> None:
    (record,) = _records(world, dtype=torch.bfloat16)[:1]
    grad = torch.full(SHAPES[0], 3 * (1 + 2.0**-12))
    (mean,) = torch.ops.hecate.reduce_scatter_dense([grad], [record.id], torch.float32)
    assert torch.equal(mean, torch.full((2, 2), 3.0))


def test_frozen_shards_get_no_gradient() -> None:
    (record,) = (add_dense_shard("frozen", torch.Size((3, 2)), GradientSync(SINGLE)),)
    (value,) = torch.ops.hecate.gather_dense([torch.randn(3, 2)], [record.id], None)
    assert not value.requires_grad


def test_unknown_id() -> None:
    with pytest.raises(LookupError, match="names dense shard -1"):
        DENSE_SHARDS[-1]
