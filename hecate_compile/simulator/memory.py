"""Bytes of states and slots on the rank that has most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hecate.simulator.capture import Capture
from hecate.simulator.routing import LayerStep


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the rank that has most: parameters, gradients and optimizer states; and slots.

    Slots hold replicas from a layer's forward to its backward (of two layers with re-materialization), and gradients
    of one layer's replicas and own experts on their way; 0 for a policy that never replicates.
    """

    states: float
    slots: float


def count_memory(
    made: Capture, step: Sequence[LayerStep], *, optimizer_bytes: float, rematerialize: bool = False
) -> Memory:
    """Add up the bytes of one step; ``optimizer_bytes`` are as in ``LiveBytes.step``."""
    dense = sum(count * (2 * size + optimizer_bytes) for count, size in made.dense)
    owned = np.zeros(len(step[0].rows))
    held, sent = [], []
    for layer, routed in zip(made.layers, step, strict=True):
        per_rank = np.asarray(routed.placement.owners.counts, dtype=np.float64)
        owned += per_rank * layer.sizes.expert_bytes * (2 + optimizer_bytes / layer.dtype.itemsize)
        _, ranks = routed.placement.pairs
        sent.append(np.bincount(ranks, minlength=len(per_rank)) * float(layer.sizes.expert_bytes))
        held.append(sent[-1] - per_rank * layer.sizes.expert_bytes)
    most = np.sort(held, axis=0)[::-1]
    slots = (most[:2] if rematerialize else most).sum(0) + np.max(sent, axis=0)
    if not made.graphs[0].context.replicates:
        slots = np.zeros_like(slots)
    worst = int(np.argmax(owned + slots))
    return Memory(states=float(dense + owned[worst]), slots=float(slots[worst]))
