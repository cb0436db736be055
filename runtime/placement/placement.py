"""Placement of a layer's experts in one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Ints, Owners

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Placement:
    """The ranks that hold each expert during one step: a superset of the owners (paper, section 4)."""

    owners: Owners
    # For each expert its owner and the ranks with a replica, ascending.
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def owned(cls, owners: Owners) -> Placement:
        """Return a placement on owners only: nothing is materialized."""
        return cls(owners, owners.alone)

    @classmethod
    def with_replicas(cls, owners: Owners, replicas: list[set[int]]) -> Placement:
        """Return a placement on the owners and on ``replicas``, the further ranks that hold each expert."""
        alone = owners.alone
        held = [tuple(sorted({*alone[e], *more})) if more else alone[e] for e, more in enumerate(replicas)]
        return cls(owners, tuple(held))

    @classmethod
    def from_matrix(cls, matrix: NDArray[np.integer]) -> Placement:
        """Return the placement with this :attr:`matrix`."""
        owners = Owners(tuple(np.argmax(matrix, axis=1).tolist()), matrix.shape[1])
        experts, ranks = np.nonzero(matrix)
        ends = np.cumsum(np.bincount(experts, minlength=len(matrix)))[:-1]
        return cls(owners, tuple(tuple(part.tolist()) for part in np.split(ranks, ends)))

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """Every (expert, holder), in that order: two int64 ``[n]``."""
        experts = np.repeat(np.arange(len(self.holders)), list(map(len, self.holders)))
        return experts, np.fromiter(chain.from_iterable(self.holders), dtype=np.int64, count=len(experts))

    @cached_property
    def starts(self) -> Ints:
        """Where each expert begins in :attr:`pairs`, and where the last one ends, int64 ``[E + 1]``."""
        return np.cumsum([0, *map(len, self.holders)], dtype=np.int64)

    @cached_property
    def leaving(self) -> Ints:
        """Places of :attr:`pairs` in the order of leaving rows: by (rank, replica, owner, expert), int64 ``[n]``."""
        experts, ranks = self.pairs
        owners = self.owner_array[experts]
        return np.lexsort((experts, owners, owners != ranks, ranks))

    @cached_property
    def matrix(self) -> NDArray[np.int8]:
        """int8 ``[E, W]``: 2 for the owner, 1 for a replica, 0 elsewhere."""
        matrix = np.zeros((self.owners.num_experts, self.owners.world_size), dtype=np.int8)
        matrix[self.pairs] = 1
        matrix[np.arange(len(matrix)), self.owner_array] = 2
        return matrix

    @cached_property
    def key(self) -> bytes:
        """:attr:`matrix` as bytes: the same for equal placements, and no others of its size."""
        return self.matrix.tobytes()

    def slots_on(self, rank: int) -> Ints:
        """Return the experts on ``rank``, own ones first, by (owner, expert): int64 ``[S]``, not to be written to."""
        if (slots := self._slots.get(rank)) is None:
            experts, ranks = self.pairs
            held = experts[ranks == rank]
            owners = self.owner_array[held]
            slots = self._slots[rank] = held[np.lexsort((held, owners, owners != rank))]
        return slots

    def replicas_on(self, rank: int) -> Ints:
        """Return the experts that ``rank`` holds and does not own, in slot order: int64 ``[K]``."""
        return self.slots_on(rank)[self.owners.counts[rank] :]

    @cached_property
    def _slots(self) -> dict[int, Ints]:
        return {}

    @property
    def owner_array(self) -> Ints:
        """The owner of each expert, int64 ``[E]``."""
        return self.owners.array

    @cached_property
    def num_replicas(self) -> int:
        """Number of expert copies that travel: the lambda * |C| of the paper's volume formula."""
        return sum(map(len, self.holders)) - len(self.holders)

    def includes(self, other: Placement) -> bool:
        """Tell whether every holder of ``other`` is one here, with the same owners."""
        return self.owners == other.owners and all(
            set(mine) >= set(theirs) for mine, theirs in zip(self.holders, other.holders, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.owners == other.owners and self.holders == other.holders

    def __hash__(self) -> int:
        return hash((self.owners, self.holders))


def changes(values: Ints) -> Bools:
    """Tell for each of ``values`` ``[n]`` whether it differs from the one before; the first one does."""
    changed = np.empty(len(values), dtype=bool)
    changed[:1] = True
    np.not_equal(values[1:], values[:-1], out=changed[1:])
    return changed
