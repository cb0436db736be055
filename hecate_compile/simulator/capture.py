"""Compile a model for any number of ranks, in one process and without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hecate.api import _state_of, compile
from hecate.config import Config
from hecate.lowering import Captured, NotRun, capturing
from hecate.runtime.layer import Layer
from hecate.simulator.cluster import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A model as rank 0 of a cluster would run it.

    Attributes:
        graphs: forward and backward, in the order in which they run.
        layers: the runtime records of its MoE layers, in the order of the graph.
        model: the compiled model, with rank 0's part of the experts.
    """

    graphs: tuple[Captured, ...]
    layers: tuple[Layer, ...]
    model: nn.Module


def capture(model: nn.Module, inputs: Mapping[str, Any], cluster: ClusterSpec, config: Config) -> Capture:
    """Compile ``model(**inputs).loss`` for ``cluster``.

    Args:
        model: not compiled yet; on the meta device it needs no memory for the experts of other ranks.
        inputs: a batch of one rank. Its tensors' values do not matter.
        config: its topology and rates are replaced by the cluster's.

    Raises:
        RuntimeError: torch.distributed is in use already, or the model has several graphs.
    """
    if dist.is_initialized():
        raise RuntimeError("hecate: a simulation needs a process of its own, without torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rates = config.rates or cluster.rates
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cluster.ranks)
    try:
        # Dynamo would take graphs of an earlier capture with as many ranks for these.
        torch._dynamo.reset()
        compiled = compile(model, replace(config, topology=cluster.topology, rates=rates))
        with capturing() as graphs:
            try:
                compiled(**inputs)
            except NotRun:
                pass
            except Exception as error:
                if not isinstance(error.__cause__, NotRun):
                    raise
    finally:
        dist.destroy_process_group()
    parts = [captured.context.part for captured in graphs]
    if parts != ["forward", "backward"]:
        raise RuntimeError(
            f"hecate: expected one forward and one backward graph, got {parts}: the simulator needs a model without "
            "graph breaks, in training mode. TORCH_LOGS=graph_breaks shows them."
        )
    state = _state_of(compiled, "simulate")
    return Capture(graphs=tuple(graphs), layers=state.layers, model=compiled)
