"""Where results of collectives lie: in memory of the compute's stream, wherever the collectives run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hecate.runtime.comm.collective import collective_named, collectives
from hecate.runtime.comm.world import World
from hecate.runtime.ops.dense import add_dense_shard
from hecate.runtime.ops.gradients import GradientSync, add_replicated
from hecate.runtime.placement.placement import Placement
from tests.runtime.ops.test_ops import OWNERS, REPLICAS, TOPOLOGIES, replicating_layer, routed
from tests.support.fake_cuda import Cuda, memory_of, tensors_in
from tests.support.threads import on_threads

# Read by the host, and then made in its memory or, behind that, on the stream of the compute.
READ = {"gather_counts", "route_nodes"}
NOTE = "forward name 0 0 0 a subject"


class Checked:
    """Runs collectives on a lane, and finds results that are memory of it."""

    def __init__(self, world: World) -> None:
        self.cuda, self.late, self.ran = Cuda(), [], set()
        object.__setattr__(world, "queue", self.cuda.queue())

    def __call__(self, name: str, *arguments: Any) -> Any:
        own = collective_named(name)
        result = own.wait(own.start(*arguments, [], NOTE), *arguments, [])
        made = {memory_of(tensor) for tensor in self.cuda.made}
        if name not in READ:
            self.late += [(name, list(one.shape)) for one in tensors_in(result) if memory_of(one) in made]
        self.ran.add(name)
        return result


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
def test_results_are_made_before_the_job_is_launched(wire: torch.dtype | None) -> None:
    """What is made on the lane must stay there: nobody tells it when the compute has read a result."""
    placement = Placement.with_replicas(OWNERS["shuffled"], REPLICAS["some replicas"])
    more = Placement.with_replicas(OWNERS["shuffled"], REPLICAS["everything everywhere"])
    found = []

    @torch.no_grad()
    def on_rank(world: World) -> None:
        run, ops = Checked(world), torch.ops.hecate
        layer = replicating_layer(world, placement, TOPOLOGIES["two nodes"], more)
        layer.wire_dtype = wire
        shard = torch.randn(layer.owners.counts[world.rank], 2, 3)
        full = run("gather_experts", shard, 5, layer.id)
        run("reduce_scatter_experts", full, len(shard), layer.id)

        rows, offsets = routed(world.rank, padding=1)
        placed, slots = ops.place(shard, layer.id)
        replicas = run("sparse_all_gather", [shard], placed, slots, layer.id)
        run("sparse_reduce_scatter", [shard], replicas, placed, len(shard), layer.id)
        counts = run("gather_counts", offsets, placed, layer.id)
        run("top_up", [shard], replicas, placed, *ops.calibrate(counts, placed, layer.id), layer.id)
        _, *ticket = ops.route(counts, placed, offsets, len(shard) + len(slots), 0, 1, layer.id)
        arrived = run("exchange", rows, *ticket, layer.id)
        run("exchange_back", arrived, *ticket, len(rows), layer.id)
        tokens = torch.arange(int(offsets[-1]))
        by_nodes = run("route_nodes", tokens, counts, placed, *ticket, 0, layer.id)
        arrived = run("exchange_nodes", rows, *by_nodes, layer.id)
        run("exchange_nodes_back", arrived, *by_nodes, len(rows), layer.id)

        sync, module = GradientSync(world, wire), nn.Linear(3, 5)
        replicated = [add_replicated(module, key, sync) for key in ("weight", "bias")]
        run("average_gradients", [torch.randn(5, 3), torch.randn(5)], [one.id for one in replicated])
        run("average_fractions", torch.randn(5), layer.id)
        dense = [add_dense_shard("weight", torch.Size((length, 3)), sync) for length in (4, 6)]
        ids = [one.id for one in dense]
        wholes = run("gather_dense", [torch.randn(2, 3), torch.randn(2, 3)], ids, wire)
        run("reduce_scatter_dense", wholes, ids, torch.float32)
        assert run.cuda.made, "what is made in between is seen"
        found.append((run.late, run.ran))

    on_threads(on_rank)
    assert found == [([], {one.name for one in collectives()})] * 3, "every collective, and nothing late"
