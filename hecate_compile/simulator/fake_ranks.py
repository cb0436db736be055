"""Be one of many ranks in one process, on a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from hecate.compilation import compile
from hecate.config import Config
from hecate.graph.lowering import Captured, NotRun, capturing
from hecate.private import dynamo_counters, fake_store, reset_dynamo
from hecate.simulator.cluster import ClusterSpec


class CaptureError(RuntimeError):
    """A model that cannot be compiled without running, or that the simulator cannot walk through."""


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Make this process rank 0 of ``count`` in the block, with a fresh Dynamo.

    Raises CaptureError if torch.distributed is in use already.
    """
    if dist.is_initialized():
        raise CaptureError("hecate: a simulation needs a process of its own, without torch.distributed")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=count)
    try:
        # Dynamo would take graphs of an earlier capture with as many ranks for these.
        reset_dynamo()
        dynamo_counters.clear()
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class NotRunModel:
    """A model compiled and not run: graphs after all passes up to the first break, and reasons of breaks, counted."""

    model: nn.Module
    graphs: list[Captured]
    breaks: dict[str, int]


def compile_as_rank_0(
    model: nn.Module, inputs: Mapping[str, Any], cluster: ClusterSpec, config: Config
) -> NotRunModel:
    """Compile ``model(**inputs)`` as rank 0 of ``cluster``, whose topology and, if none are given, rates are taken.

    Raises CaptureError if torch.distributed is in use already, and whatever :func:`hecate.compile` raises.
    """
    if config.transport != "collectives":
        raise CaptureError(f"hecate: transport={config.transport!r} needs ranks that run; it is not simulated")
    rates = config.rates or cluster.rates
    with fake_ranks(cluster.ranks):
        compiled = compile(model, replace(config, topology=cluster.topology, rates=rates))
        with capturing() as graphs, suppress(NotRun):
            compiled(**inputs)
    return NotRunModel(model=compiled, graphs=graphs, breaks=dict(dynamo_counters["graph_break"]))
