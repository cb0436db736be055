"""Every operator against its plain reference, on several ranks (threads), and opcheck on each."""

from __future__ import annotations

import pytest
import torch

from hecate.runtime.comm import collectives as comm_collectives
from hecate.runtime.comm.agreement import DisagreementError
from hecate.runtime.comm.world import SINGLE, World
from hecate.runtime.ops.experts import hold
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens
from hecate.runtime.placement.policy import LayerView, Policy
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer
from tests.support import reference
from tests.support.layers import add_layer
from tests.support.threads import on_each_rank, on_threads

OWNERS = {
    "contiguous": Owners((0, 0, 1, 1, 2), 3),
    "shuffled": Owners((2, 0, 1, 0, 2), 3),
    "one rank owns nothing": Owners((2, 0, 2, 0, 2), 3),
}


def routed(rank: int, *, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[R, 4]`` and offsets ``[5]``: other counts on every rank, expert 1 without rows, rank 2 empty."""
    counts = torch.tensor([[3, 0, 2, 1, 4], [1, 0, 0, 5, 2], [0, 0, 0, 0, 0]][rank])
    rows = torch.randn(int(counts.sum()) + padding, 4, generator=torch.Generator().manual_seed(rank))
    return rows, counts.cumsum(0).to(torch.int32)


@pytest.mark.parametrize("name", OWNERS)
def test_gather_and_reduce_scatter(name: str) -> None:
    owners = OWNERS[name]
    full = torch.randn(5, 2, 3)

    def check(world: World) -> None:
        layer = add_layer(name="test", owners=owners, world=world)
        shard = full[owners.owned_by(world.rank)].clone().requires_grad_()
        out = torch.ops.hecate.gather_experts(shard, 5, layer.id)
        shards = [full[owners.owned_by(rank)] for rank in range(3)]
        assert torch.equal(out, reference.gather_experts(shards, owners))
        grads = [torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        out.backward(grads[world.rank])
        torch.testing.assert_close(shard.grad, reference.reduce_scatter_experts(grads, owners)[world.rank])

    on_threads(check)


def test_bf16_gradients_of_all_ranks_are_added_up_in_float32() -> None:
    """256 + 1 is 256 in bf16, and 256 + 1 + 1 is 258."""
    owners = OWNERS["contiguous"]

    def check(world: World) -> None:
        grad = torch.full((5, 1), [256.0, 1.0, 1.0][world.rank], dtype=torch.bfloat16)
        total = comm_collectives.reduce_scatter_shards(grad, owners, world)
        assert total.dtype == torch.bfloat16 and torch.equal(total, torch.full_like(total, 258.0))

    on_threads(check)


REPLICAS = {
    "owners only": [set(), set(), set(), set(), set()],
    "some replicas": [{1}, set(), {0, 1, 2}, set(), {0}],
    "everything everywhere": [{0, 1, 2}] * 5,
}
TOPOLOGIES = {"one node": Topology((0, 0, 0)), "two nodes": Topology((0, 1, 0)), "three nodes": Topology((2, 0, 1))}


class Fixed(Policy):
    """Always the same replicas."""

    replicates = True

    def __init__(self, placement: Placement, later: Placement | None = None) -> None:
        self.placement, self.later = placement, later

    def place(self, layer: LayerView) -> Placement:
        return self.placement

    def calibrate(self, layer: LayerView, placement: Placement, counts: object) -> Placement:
        return self.later or placement


def replicating_layer(
    world: World, placement: Placement, topology: Topology, later: Placement | None = None, name: str = "test"
) -> Layer:
    placer = Placer(Fixed(placement, later), topology, world)
    return add_layer(name=name, owners=placement.owners, world=world, placer=placer)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", OWNERS)
def test_exchange_and_back(name: str, replicas: str) -> None:
    """Two rows of each rank are padding, which stays."""
    placement, topology = Placement.with_replicas(OWNERS[name], REPLICAS[replicas]), TOPOLOGIES["two nodes"]
    padding = 2
    everyone = [routed(rank, padding=padding) for rank in range(3)]
    rows_of, offsets_of = [rows for rows, _ in everyone], [offsets for _, offsets in everyone]
    counts = torch.stack([o.diff(prepend=o.new_zeros(1)) for o in offsets_of]).long()
    sends = [assign_tokens(counts.numpy(), placement, topology, rank).sends for rank in range(3)]
    arrived, slot_offsets = reference.exchange(rows_of, offsets_of, placement, sends)

    def check(world: World) -> None:
        rank, layer = world.rank, replicating_layer(world, placement, topology)
        rows, offsets = rows_of[rank].clone().requires_grad_(), offsets_of[rank]
        hecate = torch.ops.hecate
        placed, _ = hecate.place(rows, layer.id)
        gathered = hecate.gather_counts(offsets, placed, layer.id)
        assert torch.equal(gathered, counts)
        ends, *ticket = hecate.route(gathered, placed, offsets, len(slot_offsets[rank]), 0, 1, layer.id)
        assert torch.equal(ends, slot_offsets[rank])
        out = hecate.exchange(rows, *ticket, layer.id)
        assert torch.equal(out, arrived[rank])
        back = hecate.exchange_back(out * 2, *ticket, rows.shape[0], layer.id)
        expected = reference.exchange_back(
            [a * 2 for a in arrived], offsets_of, placement, sends, [len(r) for r in rows_of]
        )
        assert torch.equal(back, expected[rank])
        # The way there and back is the identity on rows that travel, so the gradient comes back doubled.
        grad = torch.randn_like(back)
        back.backward(grad)
        sent = int(offsets[-1])
        torch.testing.assert_close(rows.grad, torch.cat([grad[:sent] * 2, torch.zeros(padding, 4)]))
        assert torch.equal(layer.counts, counts)
        leaving = sends[rank].sum() - sends[rank][:, rank].sum()
        arriving = sum(other[:, rank].sum() for other in sends) - sends[rank][:, rank].sum()
        # float32 rows of width 4, both ways, forward and backward.
        assert layer.bytes_sent == 2 * 16 * (leaving + arriving)
        assert (layer.rows, layer.replicas) == (len(arrived[rank]), placement.num_replicas)

    on_threads(check)


def tokens_of(rank: int, count: int) -> torch.Tensor:
    """The token of each of ``count`` rows ``[count]``; some have one row, some several."""
    return torch.randint(0, max(1, count // 2), (count,), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_exchange_nodes_and_back(replicas: str, topology: str, wire: torch.dtype | None) -> None:
    """Values, gradients and bytes; rank 2 has no rows, and two rows of each other rank are padding."""
    placement, nodes = Placement.with_replicas(OWNERS["shuffled"], REPLICAS[replicas]), TOPOLOGIES[topology]
    everyone = [routed(rank, padding=2) for rank in range(3)]
    # Small whole numbers, which sums and bf16 keep.
    rows_of, offsets_of = [rows.mul(4).round() for rows, _ in everyone], [offsets for _, offsets in everyone]
    tokens = [tokens_of(rank, len(rows)) for rank, rows in enumerate(rows_of)]
    counts = torch.stack([o.diff(prepend=o.new_zeros(1)) for o in offsets_of]).long()
    sends = [assign_tokens(counts.numpy(), placement, nodes, rank).sends for rank in range(3)]
    routes = reference.route_nodes(tokens, offsets_of, placement, sends, nodes)
    arrived = reference.exchange_nodes(rows_of, routes)
    lengths = [len(rows) for rows in rows_of]

    def check(world: World) -> None:
        rank, layer = world.rank, replicating_layer(world, placement, nodes)
        layer.wire_dtype = wire
        rows, offsets = rows_of[rank].clone().requires_grad_(), offsets_of[rank]
        hecate = torch.ops.hecate
        placed, held = hecate.place(rows, layer.id)
        gathered = hecate.gather_counts(offsets, placed, layer.id)
        slots = placement.owners.counts[rank] + len(held)
        _, *ticket = hecate.route(gathered, placed, offsets, slots, 0, 1, layer.id)
        by_node = hecate.route_nodes(tokens[rank], gathered, placed, *ticket, 2, layer.id)
        assert layer.sizes.together == 2
        out = hecate.exchange_nodes(rows, *by_node, layer.id)
        assert torch.equal(out, arrived[rank])
        back = hecate.exchange_nodes_back(out * 2, *by_node, lengths[rank], layer.id)
        assert torch.equal(back, reference.exchange_nodes_back([a * 2 for a in arrived], routes, lengths)[rank])
        grads = [torch.randn(n, 4, generator=torch.Generator().manual_seed(r)).round() for r, n in enumerate(lengths)]
        back.backward(grads[rank])
        there = [g * 2 for g in reference.exchange_nodes(grads, routes)]
        assert torch.equal(rows.grad, reference.exchange_nodes_back(there, routes, lengths)[rank])
        # Each pair of a token and another node crosses once in each direction, forward and backward.
        pairs = [
            (source, int(tokens[source][row]), nodes.node_of[to])
            for to, route in enumerate(routes)
            for source, row in route
            if nodes.node_of[to] != nodes.node_of[source]
        ]
        leaving = sum(source == rank for source, *_ in set(pairs))
        relayed = sum(reference.relay_of(source, node, nodes) == rank for source, _, node in set(pairs))
        row_bytes = 4 * (2 if wire is not None else 4)
        assert layer.node_bytes_sent == 2 * row_bytes * (leaving + relayed)
        assert layer.bytes_sent >= layer.node_bytes_sent
        assert layer.sizes.row_bytes == row_bytes

    on_threads(check)


@on_each_rank
def test_a_value_for_each_row_is_no_row(world: World) -> None:
    """Routing weights travel as they are, and tell nothing about the size of a row."""
    placement = Placement.owned(OWNERS["shuffled"])
    layer, hecate = replicating_layer(world, placement, TOPOLOGIES["two nodes"]), torch.ops.hecate
    layer.wire_dtype = torch.bfloat16
    rows, offsets = routed(world.rank)
    placed, _ = hecate.place(rows, layer.id)
    counts = hecate.gather_counts(offsets, placed, layer.id)
    _, *ticket = hecate.route(counts, placed, offsets, placement.owners.counts[world.rank], 0, 1, layer.id)
    hecate.exchange(rows, *ticket, layer.id)
    weights = hecate.exchange(rows[:, :1] + 1e-3, *ticket, layer.id)
    back = hecate.exchange_back(weights, *ticket, len(rows), layer.id)
    assert torch.equal(back, rows[:, :1] + 1e-3)
    assert layer.sizes.row_bytes == 4 * 2


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_rows_in_chunks(replicas: str, chunks: int) -> None:
    """Each row travels in one chunk; what comes back adds up to what comes back in one exchange, bit for bit."""
    placement, topology = Placement.with_replicas(OWNERS["shuffled"], REPLICAS[replicas]), TOPOLOGIES["two nodes"]

    def check(world: World) -> None:
        layer, hecate = replicating_layer(world, placement, topology), torch.ops.hecate
        rows, offsets = routed(world.rank, padding=2)
        rows.requires_grad_()
        placed, held = hecate.place(rows, layer.id)
        counts = hecate.gather_counts(offsets, placed, layer.id)
        slots = placement.owners.counts[world.rank] + len(held)
        found, grads = [], []
        for parts in (1, chunks):
            tickets = hecate.route(counts, placed, offsets, slots, 0, parts, layer.id)
            total: torch.Tensor | int = 0
            for part in range(parts):
                ends, *ticket = tickets[4 * part :][:4]
                out = hecate.exchange(rows, *ticket, layer.id)
                scale = 1 + hecate.row_slots(ends, len(out))
                total = total + hecate.exchange_back(out * scale.unsqueeze(1), *ticket, len(rows), layer.id)
            assert isinstance(total, torch.Tensor)
            found.append(total)
            grads += torch.autograd.grad(total.square().sum(), rows)
        assert torch.equal(*found)
        assert torch.equal(*grads)

    on_threads(check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_fewer_bytes(dtype: torch.dtype) -> None:
    """A row is rounded each time it travels, and is of its own dtype again when it has come."""
    placement = Placement.with_replicas(OWNERS["shuffled"], REPLICAS["some replicas"])

    def check(world: World) -> None:
        found = []
        for wire in (None, torch.bfloat16):
            layer, hecate = replicating_layer(world, placement, TOPOLOGIES["one node"]), torch.ops.hecate
            layer.wire_dtype = wire
            rows, offsets = routed(world.rank)
            rows = rows.to(dtype).requires_grad_()
            placed, held = hecate.place(rows, layer.id)
            counts = hecate.gather_counts(offsets, placed, layer.id)
            slots = placement.owners.counts[world.rank] + len(held)
            _, *ticket = hecate.route(counts, placed, offsets, slots, 0, 1, layer.id)
            out = hecate.exchange(rows, *ticket, layer.id)
            back = hecate.exchange_back(out * 3, *ticket, len(rows), layer.id)
            (grad,) = torch.autograd.grad(back.square().sum(), rows)
            assert out.dtype == back.dtype == grad.dtype == dtype
            found.append((out, back, grad, layer.bytes_sent))
        (exact, *_, bytes_exact), (rounded, back, _, bytes_rounded) = found
        assert torch.equal(rounded, exact.to(torch.bfloat16).to(dtype))
        torch.testing.assert_close(back, found[0][1], rtol=2e-2, atol=1e-3)
        assert bytes_exact == bytes_rounded * (1 if dtype is torch.bfloat16 else 2)

    on_threads(check)


def slot_grads(placement: Placement, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """For every rank a gradient ``[S, *shape]`` of its slots."""
    return [
        torch.randn(len(placement.slots_on(r)), *shape, generator=torch.Generator().manual_seed(r)).to(dtype)
        for r in range(3)
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", OWNERS)
def test_sparse_all_gather(name: str, replicas: str, topology: str) -> None:
    """Values, gradients and bytes: each replica travels once, and its gradient travels once."""
    owners = OWNERS[name]
    placement = Placement.with_replicas(owners, REPLICAS[replicas])
    # Two tensors of one dtype travel together, a third of another dtype by itself.
    fulls = [torch.randn(5, 2, 3), torch.randn(5, 4), torch.randn(5, 2).bfloat16()]
    shards_of = [[full[owners.owned_by(rank)] for rank in range(3)] for full in fulls]
    grads_of = [slot_grads(placement, tuple(full.shape[1:]), full.dtype) for full in fulls]
    sent = []

    def check(world: World) -> None:
        rank, layer = world.rank, replicating_layer(world, placement, TOPOLOGIES[topology])
        shards = [of[rank].clone().requires_grad_() for of in shards_of]
        placed, slots = torch.ops.hecate.place(shards[0], layer.id)
        outs = torch.ops.hecate.sparse_all_gather(shards, placed, slots, layer.id)
        for out, of in zip(outs, shards_of, strict=True):
            assert torch.equal(out, reference.sparse_all_gather(of, placement)[rank])
        gathered = layer.expert_bytes_sent
        held = hold(layer.id, placed, *shards, *outs)
        for part, tensor in zip(held, [*shards, *outs], strict=True):
            assert part.data_ptr() == tensor.data_ptr(), "nothing is copied"
        owned = len(shards[0])
        grads = [of[rank] for of in grads_of]
        torch.autograd.backward(held, [*(grad[:owned] for grad in grads), *(grad[owned:] for grad in grads)])
        for shard, of in zip(shards, grads_of, strict=True):
            wide = [g.double() for g in of]
            expected = reference.sparse_reduce_scatter(wide, placement)[rank]
            tolerance = 2e-2 if shard.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(shard.grad.double(), expected, rtol=tolerance, atol=tolerance)
            assert shard.grad.is_contiguous()
        sent.append((gathered, layer.expert_bytes_sent - gathered))

    on_threads(check)
    expert = sum(full[0].numel() * full.element_size() for full in fulls)
    # The paper's volume: lambda * S forward and the same backward, whatever the topology.
    assert [sum(direction) for direction in zip(*sent, strict=True)] == [placement.num_replicas * expert] * 2


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_top_up(replicas: str, topology: str) -> None:
    """More replicas after the gate: only the new ones travel, and all gradients go home once."""
    owners = OWNERS["shuffled"]
    before = Placement.with_replicas(owners, [set(), {2}, {0}, set(), {0}])
    after = Placement.with_replicas(
        owners, [{*ranks, *more} for ranks, more in zip(before.holders, REPLICAS[replicas], strict=True)]
    )
    full = torch.randn(5, 2, 3)
    grads = slot_grads(after, (2, 3), torch.float32)
    sent = []

    def check(world: World) -> None:
        rank, layer = world.rank, replicating_layer(world, before, TOPOLOGIES[topology], after)
        shard = full[owners.owned_by(rank)].clone().requires_grad_()
        placed, slots = torch.ops.hecate.place(shard, layer.id)
        first = torch.ops.hecate.sparse_all_gather([shard], placed, slots, layer.id)
        gathered = layer.expert_bytes_sent
        calibrated = torch.ops.hecate.calibrate(torch.zeros(3, 5, dtype=torch.int64), placed, layer.id)
        (out,) = torch.ops.hecate.top_up([shard], first, placed, *calibrated, layer.id)
        assert torch.equal(out, full[reference.replicas_of(after, rank)])
        sent.append(layer.expert_bytes_sent - gathered)
        own, more = hold(layer.id, calibrated[0], shard, out)
        torch.autograd.backward([own, more], [grads[rank][: len(own)], grads[rank][len(own) :]])
        torch.testing.assert_close(shard.grad, reference.sparse_reduce_scatter(grads, after)[rank])

    on_threads(check)
    assert sum(sent) == (after.num_replicas - before.num_replicas) * full[0].numel() * 4


def test_owners_that_changed_before_the_backward_are_named() -> None:
    layer = add_layer(name="blocks.3.experts", owners=Owners((0, 0), 1), world=SINGLE)
    stale = torch.tensor([[2], [2]], dtype=torch.int8)
    layer.placer.change_owners(Owners((0, 0, 0), 1))
    with pytest.raises(RuntimeError, match=r"blocks\.3\.experts changed owners"):
        torch.ops.hecate.sparse_reduce_scatter([torch.zeros(2, 3)], [torch.zeros(0, 3)], stale, 2, layer.id)


def test_ranks_that_plan_differently_are_told_layer_and_step() -> None:
    owners = OWNERS["contiguous"]
    messages = []

    def check(world: World) -> None:
        # Rank 1 has another idea about expert 2.
        idea = [set(), set(), {0} if world.rank == 1 else set(), set(), set()]
        placement = Placement.with_replicas(owners, idea)
        layer = replicating_layer(world, placement, TOPOLOGIES["one node"], name="blocks.3.experts")
        placed, _ = torch.ops.hecate.place(torch.zeros(1), layer.id)
        with pytest.raises(DisagreementError) as error:
            torch.ops.hecate.gather_counts(torch.zeros(5, dtype=torch.int32), placed, layer.id)
        messages.append(str(error.value))

    on_threads(check)
    assert len(messages) == 3
    for message in messages:
        assert "layer blocks.3.experts, step 0" in message
        assert "expert 2 also on ranks [0]" in message
