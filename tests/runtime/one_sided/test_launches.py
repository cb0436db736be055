"""What one-sided exchanges would launch on a GPU, and that the host waits for none of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hecate.runtime.comm.world import World
from hecate.runtime.kernels import clear_rows, expand_segments, gather_rows, pack_experts, sum_replicas
from hecate.runtime.one_sided import (
    balance_rows,
    exchanges,
    post_words,
    put_rows,
    split_rows,
    take_rows,
    ticket_segments,
    wait_words,
)
from hecate.runtime.one_sided.device_tables import FixedTables, Recorded
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import PLACES, Windows
from hecate.runtime.placement.placement import Placement
from tests.runtime.one_sided.test_carrier import CPU, ONE_EACH, PLENTY, carrier_of, even, layer_over, windows
from tests.runtime.ops.test_ops import OWNERS, REPLICAS

MODULES = (
    balance_rows,
    split_rows,
    ticket_segments,
    expand_segments,
    gather_rows,
    put_rows,
    take_rows,
    post_words,
    wait_words,
    pack_experts,
    sum_replicas,
    clear_rows,
)


class Launch(NamedTuple):
    kernel: str
    programs: int


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would be launched on a GPU, in this order."""
    found: list[Launch] = []

    def take_notes(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        # Where there is no Triton, a kernel is a plain function.
        declared = getattr(kernel, "base_fn", kernel)
        numbers = kernel.configs[0].all_kwargs() if hasattr(kernel, "configs") else None
        found.append(Launch(declared.__name__, 0 if numbers is None else grid(numbers)))

    for module in MODULES:
        monkeypatch.setattr(module, "launch", take_notes)
        monkeypatch.setattr(module, "runs_on", lambda _: True)
    monkeypatch.setattr(exchanges, "_host_waits", lambda device: False)
    return found


def test_a_captured_step_launches_the_same_for_all_placements(launched: list[Launch]) -> None:
    """And reads no numbers of the device: fake tensors have none."""
    owners = OWNERS["contiguous"]
    placements = [Placement.with_replicas(owners, replicas) for replicas in REPLICAS.values()]
    layer = layer_over(windows()[1], World(rank=1, size=3, group=None, device=CPU), placements[1], PLENTY)
    tables = FixedTables.of(placements[1], layer)
    carrier = carrier_of(layer)
    carrier.recorded = Recorded({layer.id: tables}, torch.zeros(3, dtype=torch.int64, device=CPU))
    handle, room = torch.ops.hecate.place(torch.zeros(1), layer.id)
    used, found = layer.placer.find(handle), []
    for placement in placements:
        tables.write(placement, layer)
        launched.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            counts = torch.zeros(5, dtype=torch.int64, device=CPU)
            job = carrier.gather_counts(layer, counts)
            _, *ticket = carrier.route(layer, job.finish(job.run()), used, counts, rows=10, chunks=1)
            out = carrier.dispatch(layer, torch.zeros(10, 4, device=CPU), ticket).run()
            shards, replicas = (
                [torch.zeros(n, *shape, device=CPU) for shape in ((5, 9), ())] for n in (2, len(room))
            )
            came = carrier.gather_replicas(layer, shards, used).run()
            home = carrier.reduce_replicas(layer, shards, replicas, used).run()
        assert out.shape == (30, 4)
        assert [part.shape for part in came] == [part.shape for part in replicas]
        assert [part.shape for part in home] == [part.shape for part in shards]
        # What it has to tell has no numbers, and the next optimizer that steps in this process would ask for them.
        carrier.forget()
        found.append(list(launched))
    assert found[0] == found[1] == found[2]
    assert {"_pack_experts", "_put_rows", "_wait_words", "_sum_replicas"} <= {one.kernel for one in found[0]}


def test_the_host_reads_nothing_where_kernels_run(launched: list[Launch]) -> None:
    """Fake tensors have no numbers, so whoever asks for one fails."""
    world = World(rank=1, size=3, group=None, device=CPU)
    placement = Placement.with_replicas(OWNERS["contiguous"], REPLICAS["some replicas"])
    layer = layer_over(windows()[1], world, placement, 200)
    placed, _ = torch.ops.hecate.place(torch.zeros(1), layer.id)
    placed, (_, offsets) = layer.placer.find(placed), even(1)
    # Of numbers of the host, when the placement is new.
    carrier = carrier_of(layer)
    carrier.tables_of(placed, layer)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_offsets, rows = mode.from_tensor(offsets), torch.zeros(10, 4, device=CPU)
        counts = torch.diff(fake_offsets.long(), prepend=torch.zeros(1, dtype=torch.int64, device=CPU))
        job = carrier.gather_counts(layer, counts)
        gathered = job.finish(job.run())
        _, *ticket = carrier.route(layer, gathered, placed, rows, rows=10, chunks=1)
        out = carrier.dispatch(layer, rows, ticket).run()
        back = carrier.combine(layer, out, ticket, 10).run()
        assert out.shape == (20, 4) and back.shape == (10, 4)
        sends, receives = (torch.tensor(n, device=CPU) for n in ([2, 0, 1], [1, 1, 0]))
        experts = carrier.exchanges.carry(torch.zeros(3, 40, device=CPU), sends, receives, room=2, most=2)
        assert experts.shape == (2, 40)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            layer.carrier.settle()
    names = [one.kernel for one in launched]
    # Counts in one chunk, room for 20 rows in three, there and back, and two experts of two pieces in four.
    assert names.count("_wait_words") == names.count("_post_words") == 1 + 2 * 3 + 4
    # Of the three chunks, ten rows are in two, and three experts of two pieces in three of four.
    assert (names.count("_put_rows"), names.count("_take_rows")) == (1 + 2 + 3 + 4, 1 + 3 + 2 + 4)
    assert {"_even_out", "_arriving", "_gather_rows", "_clear_rows_behind"} <= set(names)


class Passes(TorchDispatchMode):
    """Counts bytes that torch's own operators read and write."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
        if func.namespace == "aten" and not func.is_view and "empty" not in func.__name__:
            self.bytes += sum(one.numel() * one.itemsize for one in tensors)
        return out


def test_many_rows_take_few_launches_and_no_pass_over_their_room(launched: list[Launch]) -> None:
    """65,536 rows of 4 KB among 8 ranks, with room for twice as many, in windows as large as on a GPU."""
    rows, room, size, width = 65_536, 131_072, 8, 2048
    segment = exchanges.segment_on_gpu(size)
    # Memory that nobody touches, and the same for all ranks: nothing is written here.
    window = torch.from_numpy(np.zeros((PLACES, size, segment), dtype=np.uint8))
    board = torch.zeros(PLACES, size, dtype=torch.int64)
    view = Windows(rank=1, data=[window] * size, signals=[board] * size)
    layer = layer_over(
        Transport(view, seconds=1.0), World(rank=1, size=8, group=None, device=CPU), Placement.owned(ONE_EACH), 200
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        splits = torch.zeros(3, size, dtype=torch.int64, device=CPU)
        send, receive = (torch.zeros(n, dtype=torch.int64, device=CPU) for n in (rows, room))
        there, back = (torch.zeros(n, width, dtype=torch.bfloat16, device=CPU) for n in (rows, room))
        for make in (
            lambda: layer.carrier.dispatch(layer, there, (splits, send, receive)),
            lambda: layer.carrier.combine(layer, back, (splits, send, receive), rows),
        ):
            launched.clear()
            with Passes() as passes:
                out = make().run()
            assert out.dtype == torch.bfloat16
            assert len(launched) <= 24
            assert sum(one.programs for one in launched if one.kernel in ("_put_rows", "_take_rows")) <= 9 * 2048
            # Orders and counts, no row.
            assert passes.bytes < rows * width * 2 / 10
