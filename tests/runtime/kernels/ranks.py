"""What each of three ranks runs under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch

from hecate.runtime.comm.world import find_world
from hecate.runtime.kernels import expand_segments, gather_rows, pack_experts, scatter_rows, sum_replicas
from hecate.runtime.kernels.launch import INTERPRETED
from hecate.runtime.ops import reference
from hecate.runtime.ops.experts import hold
from hecate.runtime.placement.placement import Placement
from tests.runtime.ops.test_ops import OWNERS, REPLICAS, TOPOLOGIES, replicating_layer, routed, slot_grads

MODULES = (expand_segments, gather_rows, pack_experts, scatter_rows, sum_replicas)


def compare() -> list[str]:
    """Replicas, their gradients, and rows there and back, against the references; which kernels were launched."""
    assert INTERPRETED
    launched: set[str] = set()

    def counted(name: str, launch: Any) -> Any:
        return lambda *args, **constants: (launched.add(name), launch(*args, **constants))

    for module in MODULES:
        module.launch = counted(module.__name__.rsplit(".", 1)[1], module.launch)
    torch.distributed.init_process_group("gloo")
    world = find_world(None, torch.device("cpu"))
    rank, owners = world.rank, OWNERS["shuffled"]
    placement = Placement.with_replicas(owners, REPLICAS["some replicas"])
    layer = replicating_layer(world, placement, TOPOLOGIES["two nodes"])
    hecate = torch.ops.hecate

    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(5, *shape, generator=generator) for shape in ((2, 3), (4,))]
    shards_of = [[full[owners.owned_by(other)] for other in range(3)] for full in fulls]
    grads_of = [slot_grads(placement, tuple(full.shape[1:]), full.dtype) for full in fulls]
    shards = [of[rank].clone().requires_grad_() for of in shards_of]
    placed, held = hecate.place(shards[0], layer.id)
    outs = hecate.sparse_all_gather(shards, placed, held, layer.id)
    for out, of in zip(outs, shards_of, strict=True):
        assert torch.equal(out, reference.sparse_all_gather(of, placement)[rank])
    owned, grads = len(shards[0]), [of[rank] for of in grads_of]
    torch.autograd.backward(
        hold(layer.id, placed, *shards, *outs), [*(g[:owned] for g in grads), *(g[owned:] for g in grads)]
    )
    for shard, of in zip(shards, grads_of, strict=True):
        torch.testing.assert_close(shard.grad, reference.sparse_reduce_scatter(of, placement)[rank])

    rows, offsets = routed(rank)
    counts = hecate.gather_counts(offsets, placed, layer.id)
    _, *ticket = hecate.route(counts, placed, offsets, owned + len(held), 1, layer.id)
    back = hecate.exchange_back(hecate.exchange(rows, *ticket, layer.id) * 2, *ticket, len(rows), layer.id)
    assert torch.equal(back, rows * 2)
    return sorted(launched)
