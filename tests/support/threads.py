"""Several ranks as threads of one process: real collectives in milliseconds, without torch.compile."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm.world import World


def on_each_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``test(..., world)``: it runs on three ranks in threads of this process."""
    signature = inspect.signature(test)

    @functools.wraps(test)
    def run(**given: Any) -> None:
        on_threads(lambda world: test(**given, world=world))

    others = [parameter for parameter in signature.parameters.values() if parameter.name != "world"]
    run.__signature__ = signature.replace(parameters=others)
    return run


def on_threads(function: Callable[[World], None], *, ranks: int = 3) -> None:
    """Run ``function(world)`` on so many ranks in threads of this process."""
    # torch's own tests need it, and whoever runs others need not have it.
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    if not hasattr(ThreadLocalWorld, "comms"):
        # torch 2.11 asks for them when a group ends, and these worlds have none.
        ThreadLocalWorld.comms = property(lambda _: [])

    @spawn_threads_and_init_comms(world_size=ranks)
    def run(_: object) -> None:
        function(World(rank=dist.get_rank(), size=ranks, group=dist.group.WORLD, device=torch.device("cpu")))

    class Case:
        world_size = ranks

    run(Case())
