"""The runtime record of one MoE layer, found by an integer id that is baked into graphs.

A graph must not hold ownership, placement, rank or counts, or every change of them would be a
recompile. It holds the id, and the operators look the rest up here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner import Sizes
from hecate.runtime.state.placer import LayerPlan, Placer


@dataclass
class Layer:
    """One experts module: who owns its experts, and what its last step carried.

    Attributes:
        id: the number in the graph. The same on every rank, since all ranks compile the same models
            in the same order (``hecate.compile`` compares them).
        name: qualified name of the experts module.
        placer: decides who holds what; shared by the layers of a model.
        plan: this layer's part of its decisions.
        dtype: what its experts compute in.
        expert_bytes: all parameters of one expert, as they travel.
        row_flops: operations on one row in the forward.
        row_bytes: one row, as it travels; known from the first exchange on.
        counts: rows that each rank routed to each expert in the last step, int64 ``[W, E]`` on the CPU
            (at one rank it may still be on the device); None before the first step.
        rows: rows that this rank computed in the last step.
        replicas: expert copies that travelled in the last step, over all ranks.
        bytes_sent: rows that this rank sent to others in the last step, forward and backward.
        expert_bytes_sent: experts and gradients that it sent to others in the last step.
    """

    id: int
    name: str
    owners: Owners
    world: World
    placer: Placer
    plan: LayerPlan
    dtype: torch.dtype = torch.float32
    expert_bytes: int = 0
    row_flops: int = 0
    row_bytes: int = 0
    counts: torch.Tensor | None = field(default=None, repr=False)
    rows: int = 0
    replicas: int = 0
    bytes_sent: int = 0
    expert_bytes_sent: int = 0

    @property
    def num_experts(self) -> int:
        return self.owners.num_experts

    @property
    def sizes(self) -> Sizes:
        return Sizes(row_flops=self.row_flops, row_bytes=self.row_bytes, expert_bytes=self.expert_bytes)


_layers: dict[int, Layer] = {}


def add_layer(*, name: str, owners: Owners, world: World, placer: Placer | None = None) -> Layer:
    """Create a record with the next free id; without a placer, nothing is replicated."""
    placer = placer or Placer.static(world)
    plan = LayerPlan(loads=deque(maxlen=placer.policy.window))
    layer = Layer(id=len(_layers), name=name, owners=owners, world=world, placer=placer, plan=plan)
    _layers[layer.id] = layer
    return layer


def get_layer(id: int) -> Layer:
    """The record of ``id``."""
    try:
        return _layers[id]
    except KeyError:
        raise LookupError(
            f"hecate: a graph names MoE layer {id}, but this process has {len(_layers)} layers. "
            "The graph was compiled in another process or for another model."
        ) from None
