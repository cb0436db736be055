"""Run a trace through a policy: who holds what, and which rows go where, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import LayerSizes, Rates
from hecate.runtime.placement.policy import LayerView, Policy
from hecate.runtime.placement.topology import Topology

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """The routing of one layer in one step, with the placement before the gate (``planned``) and after it.

    ``rows`` go from each rank to each, int64 ``[W, W]``; ``computed`` are those of each expert on each rank, int64
    ``[E, W]``; ``moved`` experts changed owners before this step.
    """

    planned: Placement
    placement: Placement
    rows: Ints
    computed: Ints
    moved: int


def walk(
    policy: Policy,
    counts: Ints,
    owners: Sequence[Owners],
    *,
    topology: Topology,
    rates: Rates,
    sizes: Sequence[LayerSizes],
    steps: Sequence[int] | None = None,
) -> Iterator[tuple[int, list[LayerStep]]]:
    """Run ``policy`` through counts, int64 ``[step, layer, rank, expert]``; it sees those of earlier steps only.

    Yields the number and layers of ``steps``; in others rows are not split, which is most of the work.
    """
    layers, current = counts.shape[1], list(owners)
    recent: list[deque[Any]] = [deque(maxlen=policy.window) for _ in range(layers)]
    total, seen = np.zeros((layers, counts.shape[3]), dtype=np.int64), 0
    wanted = None if steps is None else set(steps)

    def view(layer: int) -> LayerView:
        return LayerView(
            id=layer,
            owners=current[layer],
            loads=tuple(recent[layer]),
            long_load=total[layer] // max(1, seen),
            topology=topology,
            sizes=sizes[layer],
            rates=rates,
        )

    for step in range(len(counts)):
        moved = [0] * layers
        if policy.reshard_every and step and step % policy.reshard_every == 0:
            new = policy.choose_owners([view(layer) for layer in range(layers)])
            moved = [
                sum(a != b for a, b in zip(o.ranks, n.ranks, strict=True)) for o, n in zip(current, new, strict=True)
            ]
            current, total, seen = new, np.zeros_like(total), 0
        found = []
        for layer in range(layers):
            planned = policy.place(view(layer))
            if wanted is None or step in wanted:
                found.append(_layer_step(policy, view(layer), planned, counts[step, layer], moved[layer]))
            recent[layer].append(counts[step, layer].sum(0))
            total[layer] += counts[step, layer].sum(0)
        seen += 1
        if found:
            yield step, found


def _layer_step(policy: Policy, view: LayerView, planned: Placement, counts: Ints, moved: int) -> LayerStep:
    placement = policy.calibrate(view, planned, counts) if policy.calibrates else planned
    world_size = view.topology.world_size
    rows, computed = np.empty((world_size, world_size), dtype=np.int64), np.zeros_like(counts.T)
    for rank in range(world_size):
        sends = policy.assign(view, placement, counts, rank).sends
        rows[rank] = sends.sum(0)
        computed += sends
    return LayerStep(planned=planned, placement=placement, rows=rows, computed=computed, moved=moved)
