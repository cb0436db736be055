"""Call the compiled planner, or the Python one where it does not do what is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hecate.runtime.placement import planner as python
from hecate.runtime.placement.native.build import library
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel, Quotas, Recipe, Segments

_ADDRESS, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
# ``Fills`` of ``recipes.h``.
_FILLS = {False: 0, True: 1, None: 2}


class _Machine(ctypes.Structure):
    """``Machine`` of ``layer.h``."""

    _fields_ = [
        *((name, _INT) for name in ("ranks", "nodes")),
        *((name, _ADDRESS) for name in ("node_of", "node_starts")),
        *((name, _DOUBLE) for name in ("row_flops", "row_bytes", "expert_bytes", "expert_transfers")),
        *((name, _DOUBLE) for name in ("flops", "rank_bytes", "node_bytes", "hidden_seconds")),
    ]

    @classmethod
    def of(cls, costs: CostModel) -> _Machine:
        """Return what the planner knows of a machine, and of a layer's sizes. Its arrays are the topology's."""
        topology, sizes, rates = costs.topology, costs.sizes, costs.rates
        return cls(
            ranks=topology.world_size,
            nodes=topology.num_nodes,
            node_of=_address(topology.nodes),
            node_starts=_address(topology.node_bounds),
            row_flops=sizes.row_flops,
            row_bytes=sizes.row_bytes,
            expert_bytes=sizes.expert_bytes,
            expert_transfers=sizes.expert_transfers,
            flops=rates.flops,
            rank_bytes=rates.rank_bytes,
            node_bytes=rates.node_bytes,
            hidden_seconds=rates.hidden_seconds,
        )


class _Held(ctypes.Structure):
    """``Held`` of ``layer.h``."""

    _fields_ = [("experts", _INT), *((name, _ADDRESS) for name in ("owners", "starts", "holders"))]

    @classmethod
    def of(cls, placement: Placement) -> _Held:
        """Return who holds what. The arrays are the placement's."""
        arrays = placement.owner_array, placement.starts, placement.pairs[1]
        return cls(len(placement.holders), *map(_address, arrays))


class _Part(ctypes.Structure):
    """``Part`` of ``dispatch.cpp``."""

    _fields_ = [("rank", _INT), ("slots", _INT), ("experts", _ADDRESS)]

    @classmethod
    def of(cls, placement: Placement, rank: int) -> _Part:
        """Return a rank and its slots. The array is the placement's."""
        slots = placement.slots_on(rank)
        return cls(rank, len(slots), _address(slots))


def _library_for(costs: CostModel) -> ctypes.CDLL | None:
    """Return the compiled planner, unless it lacks what is rare: ranks of a node apart, rows that cross together."""
    fits = costs.topology.in_order and costs.sizes.together == 1
    return library() if fits else None


def assign_fastest(costs: CostModel, placement: Placement, counts: Ints, rank: int) -> Quotas:
    """Split the rows ``[W, E]`` over the holders as is predicted to be fastest, and return the part of ``rank``."""
    native = _library_for(costs)
    if native is None or not placement.num_replicas:
        rows = counts.sum(0).tolist()
        split = python.split_fastest(rows, placement, costs) if placement.num_replicas else None
        return python.assign_tokens(counts, placement, costs.topology, rank, "balanced", split)
    counts, slots = np.ascontiguousarray(counts, dtype=np.int64), placement.slots_on(rank)
    sent, received = np.empty_like(placement.pairs[1]), np.empty((len(slots), len(counts)), dtype=np.int64)
    _call(native.assign, _Machine.of(costs), _Held.of(placement), _Part.of(placement, rank), counts, sent, received)
    return Quotas(placement, rank, sent, received)


def segments_of(quotas: Quotas, chunk: int = 0, chunks: int = 1) -> Segments:
    """Order the rows of ``quotas``, or one chunk's part of them, as the planner's function of this name."""
    native = library()
    if native is None:
        return python.segments_of(quotas, chunk, chunks)
    placement, rank, ranks = quotas.placement, quotas.rank, quotas.placement.owners.world_size
    splits = np.empty((2, ranks), dtype=np.int64)
    leaving, arriving = (np.empty((2, length), dtype=np.int64) for length in (len(quotas.sent), quotas.received.size))
    given = _Held.of(placement), _Part.of(placement, rank), ranks, placement.leaving, quotas.sent, quotas.received
    _call(native.segments, *given, chunk, chunks, splits, leaving, arriving)
    return Segments(splits, (leaving[0], leaving[1]), (arriving[0], arriving[1]))


def search(
    load: Ints, owners: Owners, costs: CostModel, *, slots: int, frugal: bool = False, fills: bool | None = None
) -> tuple[Placement, Recipe | None, int]:
    """Return the placement of ``materialize_fastest`` or ``materialize_frugally``, its recipe, and its slots."""
    native = _library_for(costs)
    if native is None:
        way = python.materialize_frugally if frugal else python.materialize_fastest
        options = {} if frugal else {"fills": fills}
        choice = way(load, owners, costs, slots=slots, **options)
        return choice.placement, choice.recipe, choice.slots
    room, recipe = _Room(owners), np.empty(3, dtype=np.int64)
    given = owners.num_experts, _loads(load), owners.array, slots, _FILLS[fills], int(frugal)
    used = _call(native.search, _Machine.of(costs), *given, recipe, room.starts, room.holders)
    spread, in_nodes, filled = recipe.tolist()
    if spread < 0:
        return Placement.owned(owners), None, slots
    return room.placement(), Recipe(spread, bool(in_nodes), bool(filled)), used


def choose(
    load: Ints, owners: Owners, costs: CostModel, *, slots: int, recipes: Sequence[Recipe]
) -> tuple[Placement, Recipe]:
    """Return what ``materialize_again`` does: the best of a few recipes, and its placement."""
    native = _library_for(costs)
    if native is None or slots == 0 or owners.world_size == 1:
        return python.materialize_again(load, owners, costs, slots=slots, recipes=recipes)
    room = _Room(owners)
    given = owners.num_experts, _loads(load), owners.array, slots, _table(recipes), len(recipes)
    number = _call(native.choose, _Machine.of(costs), *given, room.starts, room.holders)
    return room.placement(), recipes[number]


def predict(load: Ints, owners: Owners, costs: CostModel, *, slots: int, recipe: Recipe | None) -> float:
    """Return the seconds of ``seconds_of``."""
    native = _library_for(costs)
    if native is None or owners.world_size == 1:
        return python.seconds_of(load, owners, costs, slots=slots, recipe=recipe)
    given = owners.num_experts, _loads(load), owners.array, slots, _table_of(recipe)
    return float(_call(native.predict, _Machine.of(costs), *given, returns=_DOUBLE))


def swapped_owners(load: Ints, owners: Owners, costs: CostModel, *, slots: int, recipe: Recipe | None) -> Owners:
    """Return the owners of ``swap_owners``."""
    native = _library_for(costs)
    if native is None or owners.world_size == 1:
        return python.swap_owners(load, owners, costs, slots=slots, recipe=recipe)
    ranks = owners.array.copy()
    _call(native.swap_owners, _Machine.of(costs), owners.num_experts, _loads(load), ranks, slots, _table_of(recipe))
    return Owners(tuple(ranks.tolist()), owners.world_size)


def join_segments(starts: Ints, lengths: Ints, total: int) -> Ints:
    """Concatenate the ranges ``[start, start + length)``: int64 ``[n], [n] -> [total]``; no length is negative."""
    native = library()
    if native is None:
        ends = np.cumsum(lengths)
        return np.repeat(starts - ends + lengths, lengths) + np.arange(total)
    starts, lengths = (np.ascontiguousarray(array, dtype=np.int64) for array in (starts, lengths))
    joined = np.empty(total, dtype=np.int64)
    _call(native.join, starts, lengths, len(starts), total, joined)
    return joined


class _Room:
    """Room for a placement that the compiled planner returns."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self.starts = np.empty(owners.num_experts + 1, dtype=np.int64)
        self.holders = np.empty(owners.num_experts * owners.world_size, dtype=np.int64)

    def placement(self) -> Placement:
        ends = self.starts.tolist()
        ranks = self.holders[: ends[-1]].tolist()
        return Placement(self._owners, tuple(tuple(ranks[start:end]) for start, end in pairwise(ends)))


def _loads(load: Any) -> Ints:
    return np.ascontiguousarray(load, dtype=np.int64)


def _table(recipes: Sequence[Recipe]) -> Ints:
    return np.array([[one.spread, one.in_nodes, _FILLS[one.fills]] for one in recipes], dtype=np.int64)


def _table_of(recipe: Recipe | None) -> Ints | None:
    return None if recipe is None else _table([recipe])


def _call(function: Any, *given: Any, returns: Any = _INT) -> Any:
    """Call a function with structures, arrays, numbers, or None for no address; all live until it returns."""
    function.restype = returns
    return function(*map(_argument, given))


def _argument(given: Any) -> Any:
    if isinstance(given, ctypes.Structure):
        return ctypes.byref(given)
    if isinstance(given, np.ndarray):
        return _ADDRESS(_address(given))
    return _ADDRESS(None) if given is None else _INT(given)


def _address(array: Ints) -> int:
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise TypeError(f"hecate: {array.dtype} with strides {array.strides}, not int64 one behind the other")
    return array.ctypes.data
