"""An error is told to others where there are any, and never becomes another error."""

from __future__ import annotations

import pytest
import torch

from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import known_groups
from hecate.runtime.comm.watch import telling
from hecate.runtime.comm.world import World
from tests.support.threads import on_threads


def test_groups_that_are_gone_are_nobody_to_tell() -> None:
    kept = []

    def use(world: World) -> None:
        kept.append(world.group)
        collectives.all_reduce(torch.ones(1), world)

    on_threads(use)
    assert any(group in kept for group, _ in known_groups())
    with pytest.raises(KeyError, match="mine"), telling("in its forward"):
        raise KeyError("mine")
