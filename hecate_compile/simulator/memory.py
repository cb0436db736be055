"""Bytes of states and replicas on the rank that has most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hecate.simulator.capture import Capture
from hecate.simulator.routing import LayerStep


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of the rank that has most.

    Attributes:
        states: parameters, gradients and optimizer states.
        replicas: experts of others, which stay from the forward until the layer's backward, and their gradients; with
            re-materialization those of two layers, of which one is gathered while the other computes.
    """

    states: float
    replicas: float


def measure_memory(
    made: Capture, step: Sequence[LayerStep], *, optimizer_bytes: float, rematerialize: bool = False
) -> Memory:
    """Add up the bytes of one step.

    Args:
        step: routing and placement of each layer.
        optimizer_bytes: of one parameter, beside itself and its gradient: 8 for AdamW in fp32, 12 with a master copy.
    """
    dense = sum(count * (2 * size + optimizer_bytes) for count, size in made.dense)
    owned = np.zeros(len(step[0].rows))
    held = []
    for layer, routed in zip(made.layers, step, strict=True):
        per_rank = np.asarray(routed.placement.owners.counts, dtype=np.float64)
        owned += per_rank * layer.expert_bytes * (2 + optimizer_bytes / layer.dtype.itemsize)
        _, ranks = routed.placement.pairs
        held.append((np.bincount(ranks, minlength=len(per_rank)) - per_rank) * 2 * layer.expert_bytes)
    alive = np.sort(held, axis=0)[-2:].sum(0) if rematerialize else np.sum(held, axis=0)
    worst = int(np.argmax(owned + alive))
    return Memory(states=float(dense + owned[worst]), replicas=float(alive[worst]))
