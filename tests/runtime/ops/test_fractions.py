"""Fractions of a load-balancing loss, against their reference."""

from __future__ import annotations

import torch

from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from tests.support import reference
from tests.support.layers import add_layer
from tests.support.threads import on_threads


def test_every_rank_has_the_mean() -> None:
    counts = [torch.arange(4.0) * (rank + 1) for rank in range(3)]

    def on_rank(world: World) -> None:
        layer = add_layer(name="test", owners=Owners.contiguous(4, world.size), world=world)
        own = counts[world.rank].clone()
        mean = torch.ops.hecate.average_fractions(own, layer.id)
        torch.testing.assert_close(mean, reference.average_fractions(counts))
        assert torch.equal(own, counts[world.rank])

    on_threads(on_rank)
