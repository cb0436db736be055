"""The runtime record of one MoE layer, found by an integer id that is baked into graphs.

A graph must not hold ownership, placement, rank or counts, or every change of them would be a
recompile. It holds the id, and the operators look the rest up here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hecate.runtime.owners import Owners
from hecate.runtime.world import World


@dataclass
class Layer:
    """One experts module: who owns its experts, and what its last exchange carried.

    Attributes:
        id: the number in the graph. The same on every rank, since all ranks compile the same models
            in the same order (``hecate.compile`` compares them).
        name: qualified name of the experts module.
        counts: rows that each rank routed to each expert in the last step, int64 ``[W, E]`` on the CPU
            (at one rank it may still be on the device); None before the first step.
        bytes_sent: what this rank sent to others for this layer in the last step, forward and backward.
    """

    id: int
    name: str
    owners: Owners
    world: World
    counts: torch.Tensor | None = field(default=None, repr=False)
    bytes_sent: int = 0

    @property
    def num_experts(self) -> int:
        return self.owners.num_experts


_layers: dict[int, Layer] = {}


def add_layer(*, name: str, owners: Owners, world: World) -> Layer:
    """Create a record with the next free id."""
    layer = Layer(id=len(_layers), name=name, owners=owners, world=world)
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
