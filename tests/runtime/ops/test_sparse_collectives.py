"""Gradients of replicas on their way home: the order of sums, their dtype, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hecate.passes.base import PassContext
from hecate.passes.final.in_flight import in_flight
from hecate.passes.final.node_cost import Clock
from hecate.passes.final.split_collectives import split_collectives
from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import SINGLE, World
from hecate.runtime.ops import sparse_collectives
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Travels, stages_of
from hecate.runtime.placement.topology import Topology
from tests.runtime.ops.test_ops import OWNERS, REPLICAS, TOPOLOGIES, replicating_layer
from tests.support.counted import Alive, Copies
from tests.support.graphs import number_of
from tests.support.layers import add_layer
from tests.support.threads import on_threads

WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float32}
SHAPES = ((2, 3), (4,), ())


def gradients_of(placement: Placement, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of a rank's slots, ``[S, ...]`` of each shape; sums of these depend on their order."""
    generator, slots = torch.Generator().manual_seed(rank), len(placement.slots_on(rank))
    return [torch.randn(slots, *shape, generator=generator).to(dtype) for shape in SHAPES]


def halves(grads: list[torch.Tensor], owned: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of own experts and of replicas."""
    return [grad[:owned] for grad in grads], [grad[owned:] for grad in grads]


def means_of(grads: list[torch.Tensor], placement: Placement, topology: Topology) -> list[torch.Tensor]:
    """What owners must have of one tensor, ``[E_r, ...]`` for each rank, in loops.

    Args:
        grads: of each rank's slots.
    """
    dtype = grads[0].dtype
    totals = {
        (int(expert), rank): grad[slot].to(WIDE[dtype])
        for rank, grad in enumerate(grads)
        for slot, expert in enumerate(placement.slots_on(rank))
    }
    for stage in reversed(stages_of(placement, topology)):
        for expert, giver, holder in sorted(zip(*(part.tolist() for part in vars(stage).values()), strict=True)):
            totals[expert, giver] = totals[expert, giver] + totals[expert, holder].to(dtype).to(WIDE[dtype])
    owners, means = placement.owners, []
    for rank, grad in enumerate(grads):
        rows = [(totals[expert, rank] / len(grads)).to(dtype) for expert in owners.owned_by(rank)]
        means.append(torch.stack(rows) if rows else grad[:0])
    return means


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("name", OWNERS)
def test_means_are_those_of_loops_bit_by_bit(name: str, replicas: str, topology: str) -> None:
    """Added up in float32 where a slot gets parts, and rounded when they travel and at the end."""
    placement, nodes = Placement.with_replicas(OWNERS[name], REPLICAS[replicas]), TOPOLOGIES[topology]
    everyone = [[grad for dtype in WIDE for grad in gradients_of(placement, rank, dtype)] for rank in range(3)]
    expected = [means_of(list(grads), placement, nodes) for grads in zip(*everyone, strict=True)]

    def check(world: World) -> None:
        layer, owned = replicating_layer(world, placement, nodes), placement.owners.counts[world.rank]
        matrix, _ = torch.ops.hecate.place(torch.zeros(1), layer.id)
        own, others = halves(everyone[world.rank], owned)
        # In memory columns may come first.
        own[0] = own[0].transpose(1, 2).contiguous().transpose(1, 2)
        given = [grad.clone() for grad in (*own, *others)]
        found = torch.ops.hecate.sparse_reduce_scatter(own, others, matrix, owned, layer.id)
        for mean, like, of in zip(found, own, expected, strict=True):
            assert mean.dtype == like.dtype and mean.is_contiguous() and torch.equal(mean, of[world.rank])
        assert all(map(torch.equal, (*own, *others), given)), "arguments are as they were"

    on_threads(check)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_both_collectives_read_goes_to_the_device_in_one_copy(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in none where replicas are those of the step before."""
    copies, owners = Copies(monkeypatch), OWNERS["shuffled"]
    ways = [REPLICAS["some replicas"], REPLICAS["some replicas"], REPLICAS["everything everywhere"]]

    def check(world: World) -> None:
        made = [Placement.with_replicas(owners, way) for way in ways]
        layer, owned = replicating_layer(world, made[0], TOPOLOGIES[topology]), owners.counts[world.rank]
        shards, found = [torch.ones(owned, *shape, requires_grad=True) for shape in SHAPES], []
        for step, placement in enumerate(made):
            layer.placer.model.policy.placement = placement
            # What was made in a forward without gradients is there for one with them.
            with torch.inference_mode(step == 0):
                matrix, held = torch.ops.hecate.place(shards[0], layer.id)
                replicas = torch.ops.hecate.sparse_all_gather(shards, matrix, held, layer.id)
                grads = [shard.detach() for shard in shards], [replica.detach() for replica in replicas]
                means = torch.ops.hecate.sparse_reduce_scatter(*grads, matrix, owned, layer.id)
            assert len(held) == len(placement.replicas_on(world.rank)) and len(means[0]) == owned
            found.append(copies.take())
        assert found == [1, 0, 1]

    on_threads(check)


@dataclass
class Held:
    """Bytes of one rank.

    Attributes:
        own, replicas: gradients that came in.
        travelling: while gradients travel.
        peak: the most at any time, with what the CPU takes inside of packing and of sums.
    """

    own: int
    replicas: int
    travelling: int = 0
    peak: int = 0


def send_home(placement: Placement, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Held:
    """What the first of two ranks holds beside what came in; the other one sends ones."""
    world = World(rank=0, size=2, group=None, device=torch.device("cpu"))
    topology = Topology((0, 0))
    travels = Travels(placement, world.rank, stages_of(placement, topology))
    grads = [torch.ones(len(placement.slots_on(0)), *shape, dtype=dtype) for shape in ((16, 8), (32,))]
    own, replicas = halves(grads, placement.owners.counts[0])
    held = Held(*(sum(grad.nbytes for grad in half) for half in (own, replicas)))
    alive = Alive(*grads)

    def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], world: World) -> torch.Tensor:
        received = rows.new_ones(sum(receive), rows.shape[1])
        held.travelling = max(held.travelling, alive.bytes)
        return received

    monkeypatch.setattr(collectives, "all_to_all", all_to_all)
    with alive:
        run = sparse_collectives.scatter(own, replicas, travels, world)
        del own[:], replicas[:]
        means = run()
    held.peak = alive.peak
    for expert, (mean, holders) in enumerate(zip(means[0], placement.holders, strict=False)):
        assert mean.eq(len(holders) / 2).all(), expert
    return held


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_replica_takes_memory_for_one_expert(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 own experts one has a replica elsewhere: the others are neither widened nor copied more than once."""
    nobody = [set[int]() for _ in range(31)]
    held = send_home(Placement.with_replicas(Owners.contiguous(32, 2), [{1}, *nobody]), dtype, monkeypatch)
    expert = held.own // 16
    assert held.travelling == held.own + expert + 4 // dtype.itemsize * expert, "means, what came, and its sum"
    assert held.peak <= held.own + 8 * expert


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 3])
def test_the_schedule_counts_what_gradients_on_their_way_hold(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has ``count`` replicas, and others as many of its four own experts."""
    layer = number_of(add_layer(name="layer", owners=Owners.contiguous(4, 1), world=SINGLE))
    placement = Placement.with_replicas(
        Owners.contiguous(8, 2), [{1 - expert // 4} if expert % 4 < count else set() for expert in range(8)]
    )

    def backward(shard: torch.Tensor, bias: torch.Tensor, held: torch.Tensor) -> Any:
        own, replicas = [shard, bias], [one.new_ones(count, *one.shape[1:]) for one in (shard, bias)]
        return torch.ops.hecate.sparse_reduce_scatter(own, replicas, held, 4, layer)

    inputs = torch.ones(4, 16, 8, dtype=dtype), torch.ones(4, 32, dtype=dtype), torch.full((4, 1), 2)
    gm = make_fx(backward, tracing_mode="fake")(*inputs)
    context = PassContext(world_size=2, owned=4, slots=count)
    split_collectives(gm, context)
    (one,) = in_flight(list(gm.graph.nodes))
    held = send_home(placement, dtype, monkeypatch)
    assert held.replicas == held.own * count // 4
    assert Clock(gm, context).bytes_in_flight(one.start, one.wait) == held.travelling


def test_sizes_that_depend_on_data_count_as_the_most() -> None:
    """Replicas as slots, whatever number of own experts there is."""
    layer = number_of(add_layer(name="layer", owners=Owners.contiguous(4, 1), world=SINGLE))
    ops = torch.ops.hecate

    def both(number: torch.Tensor) -> Any:
        shard = number.new_ones(4, 16, 8)
        placement, held = ops.place(shard, layer)
        (replicas,) = ops.sparse_all_gather([shard], placement, held, layer)
        return ops.sparse_reduce_scatter([shard], [replicas * 2], placement, 4, layer)

    gm = make_fx(both, tracing_mode="symbolic")(torch.ones((), dtype=torch.bfloat16))
    context = PassContext(world_size=2, owned=4, slots=2)
    split_collectives(gm, context)
    gather, reduce = in_flight(list(gm.graph.nodes))
    clock, expert = Clock(gm, context), 16 * 8 * 2
    assert clock.bytes_in_flight(gather.start, gather.wait) == 2 * 2 * expert
    assert clock.bytes_in_flight(reduce.start, reduce.wait) == (4 + 2 + 2 + 2 * 2) * expert
