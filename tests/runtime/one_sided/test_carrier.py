"""Exchanges whose sizes the host does not know, against those whose sizes it does; on threads that share windows."""

from __future__ import annotations

import gc
import platform
import time
import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm.history import labelled
from hecate.runtime.comm.watch import telling
from hecate.runtime.comm.world import SINGLE, World, find_world
from hecate.runtime.one_sided import carrier as one_sided
from hecate.runtime.one_sided import exchanges
from hecate.runtime.one_sided.carrier import OneSided
from hecate.runtime.one_sided.device_tables import FixedTables, Recorded, Room
from hecate.runtime.one_sided.exchanges import Exchanges
from hecate.runtime.one_sided.links import Rows
from hecate.runtime.one_sided.transport import LateNews, Transport
from hecate.runtime.one_sided.windows import local_windows
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state import settle
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.settle import ExchangeFailed
from hecate.runtime.state.step_mode import StepMode
from tests.runtime.ops.test_ops import OWNERS, REPLICAS, replicating_layer, routed
from tests.support import reference
from tests.support.ranks import message_of, run_ranks
from tests.support.threads import on_threads

CPU = torch.device("cpu")
ONE_NODE = Topology((0, 0, 0))
ONE_EACH = Owners((0, 1, 2), 3)
# Of 9, 8 and 0 rows; rank 2 has room only if it gets none.
PLENTY = 300
ops = torch.ops.hecate


def windows() -> list[Transport]:
    """One end of all links for each of three ranks; a place holds eight rows of four numbers."""
    return [Transport(view, seconds=200.0) for view in local_windows(3, 128, CPU)]


def layer_over(transport: Transport, world: World, placement: Placement, percent: int) -> Layer:
    layer = replicating_layer(world, placement, ONE_NODE)
    layer.carrier = OneSided(Exchanges(world, transport), percent)
    return layer


def carrier_of(layer: Layer) -> OneSided:
    """The one of :func:`layer_over`."""
    assert isinstance(layer.carrier, OneSided)
    return layer.carrier


def even(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten rows of which nine go to experts ``[10, 4]``, and offsets ``[5]``; ranks like other experts."""
    counts = torch.tensor([[3, 0, 2, 1, 3], [1, 0, 0, 6, 2], [9, 0, 0, 0, 0]][rank])
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(rank)), counts.cumsum(0).to(torch.int32)


@pytest.mark.parametrize(
    ("name", "dtype", "wire"),
    [
        ("contiguous", torch.float32, None),
        ("shuffled", torch.float32, torch.bfloat16),
        # No kernel casts float64.
        ("one rank owns nothing", torch.float64, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_rows_go_there_and_back(name: str, replicas: str, dtype: torch.dtype, wire: torch.dtype | None) -> None:
    """Values and gradients as with sizes that the host knows; behind what came are zeros."""
    placement = Placement.with_replicas(OWNERS[name], REPLICAS[replicas])
    everyone = [even(rank) for rank in range(3)]
    # Small whole numbers, which bf16 keeps.
    rows_of = [rows.mul(4).round().to(dtype) for rows, _ in everyone]
    offsets_of = [offsets for _, offsets in everyone]
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
        ends, *ticket = ops.route(gathered, placed, offsets, len(slot_offsets[rank]), 10, 1, layer.id)
        assert torch.equal(ends, slot_offsets[rank])
        out = ops.exchange(rows, *ticket, layer.id)
        came = len(arrived[rank])
        assert out.shape == (30, 4) and torch.equal(out[:came], arrived[rank]) and not out[came:].any()
        # What lies behind is never sent: not even NaN.
        used = torch.where(torch.arange(30)[:, None] < came, out * 2, torch.nan)
        back = ops.exchange_back(used, *ticket, 10, layer.id)
        assert torch.equal(back, torch.cat([rows[:9] * 2, torch.zeros(1, 4, dtype=dtype)]))
        grad = torch.randn(10, 4, dtype=dtype).mul(4).round()
        back.backward(grad)
        assert torch.equal(rows.grad, torch.cat([grad[:9] * 2, torch.zeros(1, 4, dtype=dtype)]))
        # Numbers of another kind.
        ids = torch.arange(10) + 100 * rank
        assert torch.equal(
            ops.exchange_back(ops.exchange(ids, *ticket, layer.id), *ticket, 10, layer.id)[:9], ids[:9]
        )
        layer.carrier.settle()
        layer.read_rows()
        leaving = sends[rank].sum() - sends[rank][:, rank].sum()
        arriving = sum(other[:, rank].sum() for other in sends) - sends[rank][:, rank].sum()
        assert layer.rows == came
        size = 4 * (2 if wire else 4)
        assert layer.bytes_sent == (2 * size + 8) * (leaving + arriving)
        assert np.array_equal(layer.placer.plan.loads[-1], counts.sum(0).numpy())

    on_threads(check)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", OWNERS)
def test_replicas_and_gradients_travel_as_with_collectives(name: str, replicas: str) -> None:
    """Bit by bit, whether an expert is one piece, several, or more than several."""
    placement = Placement.with_replicas(OWNERS[name], REPLICAS[replicas])
    transports = windows()

    def check(world: World) -> None:
        rank = world.rank
        owned, slots = placement.owners.counts[rank], len(placement.slots_on(rank))
        plain = replicating_layer(world, placement, ONE_NODE)
        one_sided = layer_over(transports[rank], world, placement, PLENTY)
        for width, dtype in product((3, 48, 49), (torch.float32, torch.bfloat16, torch.float64)):
            generator = torch.Generator().manual_seed(rank)
            shards, grads = (
                [torch.randn(n, *shape, generator=generator).to(dtype) for shape in ((width, 2), ())]
                for n in (owned, slots)
            )
            own, others = ([grad[part] for grad in grads] for part in (slice(owned), slice(owned, None)))
            found = []
            for layer in (plain, one_sided):
                placed, held = ops.place(shards[0], layer.id)
                came = ops.sparse_all_gather(shards, placed, held, layer.id)
                found.append([*came, *ops.sparse_reduce_scatter(own, others, placed, owned, layer.id)])
            assert all(map(torch.equal, *found)), width
        one_sided.carrier.settle(whole=True)
        assert one_sided.expert_bytes_sent == plain.expert_bytes_sent

    on_threads(check)


@pytest.mark.parametrize("name", OWNERS)
def test_what_was_recorded_reads_other_placements(name: str) -> None:
    """Operators are called with the first placement, as graphs carry it, and do what tables say by now."""
    placements = [Placement.with_replicas(OWNERS[name], replicas) for replicas in REPLICAS.values()]
    transports = windows()

    def check(world: World) -> None:
        rank = world.rank
        owned = OWNERS[name].counts[rank]
        (rows, offsets), generator = even(rank), torch.Generator().manual_seed(rank)
        shards = [torch.randn(owned, *shape, generator=generator) for shape in ((7, 2), ())]
        recorded = layer_over(transports[rank], world, placements[-1], PLENTY)
        tables = FixedTables.of(placements[-1], recorded)
        assert all(map(tables.has_room_for, placements))
        carrier = carrier_of(recorded)
        carrier.recorded = Recorded({recorded.id: tables}, carrier.signature(recorded.placer.model.signature))
        handle, room = ops.place(rows, recorded.id)
        slots = owned + len(room)
        for placement in placements:
            tables.write(placement, recorded)
            expected = layer_over(transports[rank], world, placement, PLENTY)
            found = []
            for layer in (expected, recorded):
                placed, held = ops.place(rows, layer.id) if layer is expected else (handle, room)
                ends, *ticket = ops.route(
                    ops.gather_counts(offsets, placed, layer.id), placed, offsets, owned + len(held), 10, 1, layer.id
                )
                out = ops.exchange(rows, *ticket, layer.id)
                back = ops.exchange_back(out * 2, *ticket, 10, layer.id)
                replicas = ops.sparse_all_gather(shards, placed, held, layer.id)
                grads = [
                    torch.randn(slots, *shard.shape[1:], generator=torch.Generator().manual_seed(rank))
                    for shard in shards
                ]
                halves = [[grad[part] for grad in grads] for part in (slice(owned), slice(owned, owned + len(held)))]
                home = ops.sparse_reduce_scatter(*halves, placed, owned, layer.id)
                count = placement.num_replicas and len(placement.slots_on(rank)) - owned
                found.append([out, back, ends[: owned + count], *home, *(part[:count] for part in replicas)])
            assert all(map(torch.equal, *found))
            # Slots that nobody fills get no rows.
            assert (ends[owned + count :] == (ends[owned + count - 1] if owned + count else 0)).all()
        recorded.carrier.settle(whole=True)

    on_threads(check)


def test_room_is_for_what_fits() -> None:
    owners = OWNERS["contiguous"]
    none, some, everything = (Placement.with_replicas(owners, replicas) for replicas in REPLICAS.values())
    assert Room.needed(none) == Room(replicas=0, leaving=0, replicated=0)
    assert Room.needed(some) == Room(replicas=2, leaving=2, replicated=3)
    assert Room.needed(everything) == Room(replicas=4, leaving=4, replicated=5)
    assert Room.generous(none).holds(Room.needed(none)) and Room.generous(none).replicas == 2
    assert not Room.generous(none).holds(Room.needed(everything))
    assert Room.generous(everything) == Room(replicas=4, leaving=4, replicated=5), "there are no more"


def test_pieces_of_an_expert_fit() -> None:
    widths, dtypes = (1, 3, 8192, 8193, 99_991, 3 * 2048 * 768), (torch.float64, torch.float32, torch.bfloat16)
    for width, dtype, segment in product(widths, dtypes, (128, 4096, 2**22)):
        piece = exchanges.piece_of(width, dtype, segment)
        size, pieces = piece * dtype.itemsize, -(-width // piece)
        assert size <= min(segment, 2**14)
        assert pieces == 1 or size % 16 == 0, "each begins where kernels load vectors"
        assert pieces * piece <= 1.2 * width, "little is added"


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
            layer.carrier.settle()
            assert layer.placer.plan.steps_seen == before + training
            layer.carrier.settle()
            assert layer.placer.plan.steps_seen == 1

    on_threads(check)


def test_without_room_nothing_travels_and_all_ranks_say_so() -> None:
    """All rows go to rank 0, which has room for 13 of them."""
    transports = windows()
    placement = Placement.owned(Owners((0, 0, 0, 0, 0), 3))

    def check(world: World) -> None:
        layer = layer_over(transports[world.rank], world, placement, 150)
        carrier = carrier_of(layer)
        rows, offsets = even(world.rank)
        rows.requires_grad_()
        for _ in range(2):
            placed, _ = ops.place(rows, layer.id)
            gathered = ops.gather_counts(offsets, placed, layer.id)
            slots = 5 if world.rank == 0 else 0
            ends, *ticket = ops.route(gathered, placed, offsets, slots, 10, 1, layer.id)
            assert not len(ends) or int(ends.max()) <= 15
            assert ticket[0].tolist() == [[0, 0, 0], [0, 0, 0], [14, 0, 0]]
            out = ops.exchange(rows, *ticket, layer.id)
            back = ops.exchange_back(out, *ticket, 10, layer.id)
            assert out.isnan().all() and back.isnan().all()
            (grad,) = torch.autograd.grad(back.sum(), rows)
            assert grad.isnan().all()
            with pytest.raises(ExchangeFailed) as raised:
                layer.carrier.settle()
            assert "rows of test, step" in str(raised.value) and "27 rows would come to rank 0" in str(raised.value)
            assert "1.5 times the 9 that it has itself" in str(raised.value)
            assert "Config(capacity=3) would have been enough" in str(raised.value)
            # It is said once.
            layer.carrier.settle()
        # With room it goes on.
        carrier.room_percent = 300
        placed, _ = ops.place(rows, layer.id)
        gathered = ops.gather_counts(offsets, placed, layer.id)
        ends, *ticket = ops.route(gathered, placed, offsets, slots, 10, 1, layer.id)
        there_and_back = ops.exchange_back(ops.exchange(rows, *ticket, layer.id), *ticket, 10, layer.id)
        assert torch.equal(there_and_back[:9], rows[:9])
        layer.carrier.settle()

    on_threads(check)


def test_a_rank_without_rows_is_told_that_no_capacity_is_enough() -> None:
    message = one_sided._no_room("rows", [0, 3], [6, 0], 200)
    assert "3 rows would come to rank 1, which has room for 0" in message
    assert "no room, whatever the capacity" in message and "Config(capacity" not in message


def test_where_kernels_wait_a_late_rank_leaves_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is told later, or when it asks for all of it."""
    monkeypatch.setattr(exchanges, "_host_waits", lambda device: False)
    transport = Transport(local_windows(3, 128, CPU)[1], seconds=0.01)
    layer = layer_over(transport, World(rank=1, size=3, group=None, device=CPU), Placement.owned(ONE_EACH), 200)
    rows, order = torch.ones(6, 4), torch.arange(6)
    splits = torch.tensor([[2, 2, 2], [2, 2, 2], [0, 0, 0]])
    for out in (
        layer.carrier.dispatch(layer, rows, (splits, order, order)).run(),
        layer.carrier.combine(layer, rows, (splits, order, order), 6).run(),
    ):
        assert out.isnan().all()
    layer.carrier.settle()
    with pytest.raises(ExchangeFailed, match=r"waited in vain for ranks \[0, 2\]"):
        layer.carrier.settle(whole=True)
    told: list[list[int]] = []
    carrier_of(layer).news.send(torch.arange(2), lambda numbers: told.append(numbers.tolist()))
    with pytest.raises(ExchangeFailed, match="waited in vain"):
        layer.carrier.settle()
    assert not told


def test_of_a_model_that_is_gone_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its garbage has been collected differs between ranks."""
    monkeypatch.setattr(settle, "_SETTLING", weakref.WeakValueDictionary())
    told: list[list[int]] = []

    def refuse(numbers: torch.Tensor) -> None:
        told.append(numbers.tolist())
        raise ExchangeFailed("no room")

    class Model:
        def __init__(self) -> None:
            transport = Transport(local_windows(1, 128, CPU)[0], seconds=1.0)
            self.me, self.carrier = self, OneSided(Exchanges(SINGLE, transport), 100)
            self.carrier.news.send(torch.arange(2), refuse)

    gone, here, forgotten = Model(), Model(), Model()
    forgotten.carrier.forget()
    gc.disable()
    try:
        del gone
        with pytest.raises(ExchangeFailed, match="no room"):
            settle.settle_all()
    finally:
        gc.enable()
    assert told == [[0, 1], [0, 1]]
    here.carrier.settle()


def test_what_is_replayed_is_told_again_behind_its_event() -> None:
    class Event:
        def synchronize(self) -> None:
            told.append("there")

    told: list[Any] = []
    news = LateNews(Transport(local_windows(1, 128, CPU)[0], seconds=1.0))
    news.send(torch.arange(2), lambda numbers: told.append(numbers.tolist()))
    messages = news.take()
    news.read()
    assert not told
    for _ in range(2):
        news.send_again(messages, Event())
        news.read()
    assert told == ["there", [0, 1]] * 2


def wait_for_one_that_failed() -> dict[str, Any]:
    """On one rank: the last one raises in front of an exchange, its program catches that, and it stays."""
    world = find_world(None, CPU)
    links = Exchanges.between(world)
    rows, one = torch.ones(2, 4), torch.ones(2, dtype=torch.int64)

    def exchange() -> None:
        with labelled("exchange of a test"):
            links.exchange(Rows(rows), one, Rows(rows.clone()), most=1, wire=rows.dtype, expects=one)

    def fail() -> None:
        with telling("in its forward"):
            raise IndexError("no such token")

    exchange()
    begin, store = time.monotonic(), dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        said = message_of(exchange)
        store.set("said", said)
    else:
        said = message_of(fail)
        store.wait(["said"])
    return {"said": said, "seconds": time.monotonic() - begin, "again": message_of(exchange)}


@pytest.mark.distributed
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="plain stores are not in order")
def test_a_rank_that_failed_is_named_before_the_groups_timeout() -> None:
    first, _ = run_ranks(wait_for_one_that_failed, 2, timeout=120)
    assert "exchange of a test cannot end: rank 1 raised IndexError: no such token in its forward" in first["said"]
    assert first["said"] == first["again"] and first["seconds"] < 60
