"""Be one of many ranks in one process, on a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class CaptureError(RuntimeError):
    """A model that cannot be compiled without running, or that the simulator cannot walk through."""


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Inside the block this process is rank 0 of ``count``, and Dynamo has compiled nothing yet.

    Raises:
        CaptureError: torch.distributed is in use already.
    """
    if dist.is_initialized():
        raise CaptureError("hecate: a simulation needs a process of its own, without torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        # Dynamo would take graphs of an earlier capture with as many ranks for these.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
    finally:
        dist.destroy_process_group()
