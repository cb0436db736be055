"""Exchanges whose sizes the host does not know, against those whose sizes it does; on threads that share windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hecate.runtime.comm.windows import local_windows
from hecate.runtime.comm.world import World
from hecate.runtime.kernels import (
    balance_rows,
    expand_segments,
    gather_rows,
    post_words,
    put_rows,
    split_rows,
    take_rows,
    ticket_segments,
    wait_words,
)
from hecate.runtime.ops import reference, symmetric
from hecate.runtime.ops.one_sided import ExchangeFailed, Transport
from hecate.runtime.ops.symmetric import Symmetric
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.step_mode import StepMode
from tests.runtime.ops.test_ops import OWNERS, REPLICAS, replicating_layer, routed
from tests.support.threads import on_threads

CPU = torch.device("cpu")
ONE_NODE = Topology((0, 0, 0))
# Of 9, 8 and 0 rows; rank 2 has room only if it gets none.
PLENTY = 300
ops = torch.ops.hecate


def windows() -> list[Transport]:
    """One end of all links for each of three ranks; a place holds eight rows of four numbers."""
    return [Transport(view, polls=100_000) for view in local_windows(3, 128, CPU)]


def layer_over(transport: Transport, world: World, placement: Placement, percent: int) -> Layer:
    layer = replicating_layer(world, placement, ONE_NODE)
    layer.symmetric = Symmetric(world, transport, percent)
    return layer


def even(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten rows of which nine go to experts ``[10, 4]``, and offsets ``[5]``; ranks like other experts."""
    counts = torch.tensor([[3, 0, 2, 1, 3], [1, 0, 0, 6, 2], [9, 0, 0, 0, 0]][rank])
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(rank)), counts.cumsum(0).to(torch.int32)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", OWNERS)
def test_rows_go_there_and_back(name: str, replicas: str, wire: torch.dtype | None) -> None:
    """Values and gradients as with sizes that the host knows; behind what came are zeros."""
    placement = Placement.with_replicas(OWNERS[name], REPLICAS[replicas])
    everyone = [even(rank) for rank in range(3)]
    # Small whole numbers, which bf16 keeps.
    rows_of, offsets_of = [rows.mul(4).round() for rows, _ in everyone], [offsets for _, offsets in everyone]
    counts = torch.stack([o.diff(prepend=o.new_zeros(1)) for o in offsets_of]).long()
    sends = [assign_tokens(counts.numpy(), placement, ONE_NODE, rank).sends for rank in range(3)]
    arrived, slot_offsets = reference.exchange(rows_of, offsets_of, placement, sends)
    transports = windows()

    def check(world: World) -> None:
        rank = world.rank
        layer = layer_over(transports[rank], world, placement, PLENTY)
        layer.wire_dtype = wire
        rows, offsets = rows_of[rank].clone().requires_grad_(), offsets_of[rank]
        placed, _ = ops.place(rows, layer.id)
        gathered = ops.gather_counts(offsets, placed, layer.id)
        assert torch.equal(gathered, counts) and torch.equal(layer.counts, counts)
        ends, *ticket = ops.route_fixed(gathered, placed, offsets, len(slot_offsets[rank]), 10, PLENTY, layer.id)
        assert torch.equal(ends, slot_offsets[rank])
        out = ops.exchange(rows, *ticket, layer.id)
        came = len(arrived[rank])
        assert out.shape == (30, 4) and torch.equal(out[:came], arrived[rank]) and not out[came:].any()
        # What lies behind is never sent: not even NaN.
        used = torch.where(torch.arange(30)[:, None] < came, out * 2, torch.nan)
        back = ops.exchange_back(used, *ticket, 10, layer.id)
        assert torch.equal(back, torch.cat([rows[:9] * 2, torch.zeros(1, 4)]))
        grad = torch.randn(10, 4).mul(4).round()
        back.backward(grad)
        assert torch.equal(rows.grad, torch.cat([grad[:9] * 2, torch.zeros(1, 4)]))
        # Numbers of another kind.
        ids = torch.arange(10) + 100 * rank
        assert torch.equal(
            ops.exchange_back(ops.exchange(ids, *ticket, layer.id), *ticket, 10, layer.id)[:9], ids[:9]
        )
        layer.symmetric.settle()
        layer.read_rows()
        leaving = sends[rank].sum() - sends[rank][:, rank].sum()
        arriving = sum(other[:, rank].sum() for other in sends) - sends[rank][:, rank].sum()
        assert layer.rows == came
        size = 4 * (2 if wire else 4)
        assert layer.bytes_sent == (2 * size + 8) * (leaving + arriving)
        assert np.array_equal(layer.placer.plan.loads[-1], counts.sum(0).numpy())

    on_threads(check)


def test_counts_are_learned_from_when_the_host_settles() -> None:
    transports = windows()
    placement = Placement.owned(OWNERS["contiguous"])

    def check(world: World) -> None:
        layer = layer_over(transports[world.rank], world, placement, PLENTY)
        model = layer.placer.model
        for training in (True, False):
            model.step.mode = StepMode(training=training, first=False)
            placed, _ = ops.place(torch.zeros(1), layer.id)
            ops.gather_counts(routed(world.rank)[1], placed, layer.id)
            # Whether a forward trains is known while it runs.
            model.step.mode = None
            before = layer.placer.plan.steps_seen
            layer.symmetric.settle()
            assert layer.placer.plan.steps_seen == before + training
            layer.symmetric.settle()
            assert layer.placer.plan.steps_seen == 1

    on_threads(check)


def test_without_room_nothing_travels_and_all_ranks_say_so() -> None:
    """All rows go to rank 0, which has room for 13 of them."""
    transports = windows()
    placement = Placement.owned(Owners((0, 0, 0, 0, 0), 3))

    def check(world: World) -> None:
        layer = layer_over(transports[world.rank], world, placement, 150)
        rows, offsets = even(world.rank)
        rows.requires_grad_()
        for _ in range(2):
            placed, _ = ops.place(rows, layer.id)
            gathered = ops.gather_counts(offsets, placed, layer.id)
            slots = 5 if world.rank == 0 else 0
            ends, *ticket = ops.route_fixed(gathered, placed, offsets, slots, 10, 150, layer.id)
            assert not len(ends) or int(ends.max()) <= 15
            assert ticket[0].tolist() == [[0, 0, 0], [0, 0, 0], [14, 0, 0]]
            out = ops.exchange(rows, *ticket, layer.id)
            back = ops.exchange_back(out, *ticket, 10, layer.id)
            assert out.isnan().all() and back.isnan().all()
            (grad,) = torch.autograd.grad(back.sum(), rows)
            assert grad.isnan().all()
            with pytest.raises(ExchangeFailed) as raised:
                layer.symmetric.settle()
            assert "rows of test, step" in str(raised.value) and "27 rows would come to rank 0" in str(raised.value)
            assert "1.5 times the 9 that it has itself" in str(raised.value)
            assert "Config(capacity=3) would have been enough" in str(raised.value)
            # It is said once.
            layer.symmetric.settle()
        # With room it goes on.
        placed, _ = ops.place(rows, layer.id)
        gathered = ops.gather_counts(offsets, placed, layer.id)
        ends, *ticket = ops.route_fixed(gathered, placed, offsets, slots, 10, 300, layer.id)
        there_and_back = ops.exchange_back(ops.exchange(rows, *ticket, layer.id), *ticket, 10, layer.id)
        assert torch.equal(there_and_back[:9], rows[:9])
        layer.symmetric.settle()

    on_threads(check)


MODULES = (
    balance_rows, split_rows, ticket_segments, expand_segments, gather_rows, put_rows, take_rows, post_words,
    wait_words,
)  # fmt: skip


def test_the_host_reads_nothing_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no numbers, so whoever asks for one fails."""
    launched: list[str] = []

    def take_notes(kernel: Any, grid: Any, device: torch.device, *args: Any, **constants: Any) -> None:
        launched.append(getattr(kernel, "__name__", None) or kernel.base_fn.__name__)

    for module in MODULES:
        monkeypatch.setattr(module, "launch", take_notes)
        monkeypatch.setattr(module, "runs_on", lambda _: True)
    world = World(rank=1, size=3, group=None, device=CPU)
    placement = Placement.with_replicas(OWNERS["contiguous"], REPLICAS["some replicas"])
    layer = layer_over(windows()[1], world, placement, 200)
    # On CUDA it does not ask after each exchange.
    monkeypatch.setattr(Symmetric, "exchange", lambda self, *args, **kw: self.transport.exchange(*args, **kw))
    placed, _ = ops.place(torch.zeros(1), layer.id)
    placed, (_, offsets) = layer.placer.find(placed), even(1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_offsets, rows = mode.from_tensor(offsets), torch.zeros(10, 4, device=CPU)
        counts = torch.diff(fake_offsets.long(), prepend=torch.zeros(1, dtype=torch.int64, device=CPU))
        job = symmetric.gather_counts(layer, counts)
        gathered = job.finish(job.run())
        ticket = symmetric.route(layer, gathered, placed, 10, 200)
        parts = (ticket.splits, ticket.send_index, ticket.receive_index)
        out = symmetric.exchange(layer, rows, *parts).run()
        back = symmetric.exchange_back(layer, out, *parts, 10).run()
        assert out.shape == (20, 4) and back.shape == (10, 4)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            layer.symmetric.settle()
    # Counts in one chunk, and room for 20 rows in three, there and back.
    assert launched.count("_put_rows") == launched.count("_take_rows") == 1 + 2 * 3
    assert {"_even_out", "_arriving", "_wait_words", "_post_words", "_gather_rows"} <= set(launched)
