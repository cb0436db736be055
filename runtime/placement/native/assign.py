"""Call the compiled planner."""

from __future__ import annotations

import ctypes

import numpy as np

from hecate.runtime.placement.native.build import library
from hecate.runtime.placement.owners import Ints
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel, Quotas, assign_tokens, split_fastest

_INTS = ("ranks", "nodes", "experts", "slots", "rank")
_ARRAYS = ("starts", "holders", "owners", "node_of", "node_starts", "slot_experts")
_DOUBLES = ("row_flops", "row_bytes", "flops", "rank_bytes", "node_bytes")


class _Layer(ctypes.Structure):
    """``Layer`` of ``layer.h``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTS),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_double) for name in _DOUBLES),
    ]


def assign_fastest(costs: CostModel, placement: Placement, counts: Ints, rank: int) -> Quotas:
    """Split the rows ``[W, E]`` over the holders as is predicted to be fastest, and return the part of ``rank``."""
    topology, sizes, rates = costs.topology, costs.sizes, costs.rates
    native = library()
    # What is rare is left to Python: nodes of ranks that are not neighbours, and rows that cross once for a token.
    if native is None or not placement.num_replicas or not topology.in_order or sizes.together > 1:
        rows = counts.sum(0).tolist()
        split = split_fastest(rows, placement, costs) if placement.num_replicas else None
        return assign_tokens(counts, placement, topology, rank, "balanced", split)
    holders, slots = placement.pairs[1], placement.slots_on(rank)
    arrays = dict(
        starts=np.append(placement.starts, len(holders)),
        holders=holders,
        owners=placement.owner_array,
        node_of=topology.nodes,
        node_starts=topology.node_bounds,
        slot_experts=slots,
    )
    layer = _Layer(
        ranks=topology.world_size,
        nodes=topology.num_nodes,
        experts=len(placement.starts),
        slots=len(slots),
        rank=rank,
        row_flops=sizes.row_flops,
        row_bytes=sizes.row_bytes,
        flops=rates.flops,
        rank_bytes=rates.rank_bytes,
        node_bytes=rates.node_bytes,
        **{name: _address(array) for name, array in arrays.items()},
    )
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    sent, received = np.empty(len(holders), dtype=np.int64), np.empty((len(slots), len(counts)), dtype=np.int64)
    native.assign(ctypes.byref(layer), *map(ctypes.c_void_p, map(_address, (counts, sent, received))))
    return Quotas(placement, rank, sent, received)


def join_segments(starts: Ints, lengths: Ints, total: int) -> Ints:
    """Concatenate the ranges ``[start, start + length)``: int64 ``[n], [n] -> [total]``."""
    native = library()
    if native is None:
        ends = np.cumsum(lengths)
        return np.repeat(starts - ends + lengths, lengths) + np.arange(total)
    starts, lengths = map(np.ascontiguousarray, (starts, lengths))
    joined = np.empty(total, dtype=np.int64)
    first, second, out = (ctypes.c_void_p(_address(array)) for array in (starts, lengths, joined))
    native.join(first, second, ctypes.c_int64(len(starts)), out)
    return joined


def _address(array: Ints) -> int:
    assert array.dtype == np.int64 and array.flags.c_contiguous, (array.dtype, array.flags)
    return array.ctypes.data
