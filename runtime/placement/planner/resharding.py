"""Re-shard: decide which rank owns which expert, by the paper's Algorithm 2 (heterogeneous sharding)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.topology import Topology


def shard_owners(
    loads: Sequence[NDArray[np.integer]], owners: Sequence[Owners], topology: Topology, overlap: Sequence[int]
) -> list[Owners]:
    """Choose owners of the cold experts of every layer so that all ranks own about as many rows (paper, Algorithm 2).

    The ``overlap[g]`` hottest experts of layer g will be replicated anyway, so where they are owned matters little:
    they fill the slots that remain. A rank keeps as many owner slots over the whole model as it has now, any number
    in one layer. Layers are visited by their hottest expert, descending; each cold expert, hottest first, goes to
    the node with least load in this layer that has a free slot, then to the rank with least load on it. Ties go by
    load over all layers so far, then to fewer free slots, then to the smaller id.

    Args:
        loads: rows per expert, ``[E]`` for each layer.
        owners: the present owners, for the number of slots.

    Returns:
        New owners of each layer.
    """
    rows = [load.tolist() for load in loads]
    world_size = topology.world_size
    free = [sum(layer.counts[rank] for layer in owners) for rank in range(world_size)]
    total = [0] * world_size
    result: list[list[int | None]] = [[None] * len(load) for load in rows]
    visits = sorted(range(len(rows)), key=lambda layer: (-max(rows[layer], default=0), layer))
    for layer in visits:
        order = sorted(range(len(rows[layer])), key=lambda e: (-rows[layer][e], e))
        here = [0] * world_size
        for expert in order[overlap[layer] :]:
            rank = _least_loaded(here, total, free, topology)
            result[layer][expert] = rank
            here[rank] += rows[layer][expert]
            total[rank] += rows[layer][expert]
            free[rank] -= 1
    chosen = []
    for layer in range(len(rows)):
        ranks: list[int] = []
        for given in result[layer]:
            rank = max(range(world_size), key=lambda r: (free[r], -total[r], -r)) if given is None else given
            free[rank] -= given is None
            ranks.append(rank)
        chosen.append(Owners(tuple(ranks), world_size))
    return chosen


def _least_loaded(here: list[int], total: list[int], free: list[int], topology: Topology) -> int:
    """A rank with a free slot, on the node with least load in this layer."""

    def load_of(ranks: Sequence[int]) -> tuple[float, float, int]:
        # Per rank, since nodes may have different numbers of them.
        return (
            sum(here[r] for r in ranks) / len(ranks),
            sum(total[r] for r in ranks) / len(ranks),
            sum(free[r] for r in ranks),
        )

    # min takes the first of equals.
    node = min((ranks for ranks in topology.members if any(free[r] for r in ranks)), key=load_of)
    return min((rank for rank in node if free[rank]), key=lambda rank: load_of((rank,)))
