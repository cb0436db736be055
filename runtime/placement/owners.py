"""Owners of the experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Owners:
    """Owners of the experts of one layer, one rank each; a rank keeps its experts, maybe none, in slots by id."""

    ranks: tuple[int, ...]  # the owner of each expert, length E
    world_size: int

    def __post_init__(self) -> None:
        if not all(0 <= rank < self.world_size for rank in self.ranks):
            raise ValueError(f"owners {self.ranks} name a rank outside 0..{self.world_size - 1}")

    @classmethod
    def contiguous(cls, num_experts: int, world_size: int) -> Owners:
        """Return an even start: E // W experts per rank in order, the first E % W ranks hold one more."""
        share, extra = divmod(num_experts, world_size)
        ranks = [rank for rank in range(world_size) for _ in range(share + (rank < extra))]
        return cls(tuple(ranks), world_size)

    @property
    def num_experts(self) -> int:
        return len(self.ranks)

    def owned_by(self, rank: int) -> list[int]:
        """Return the experts of ``rank``, in slot order."""
        return [expert for expert, owner in enumerate(self.ranks) if owner == rank]

    def rows(self, rows: Sequence[int]) -> list[int]:
        """Return the rows of each rank, length W, if owners compute all ``rows`` of their experts, length E."""
        level = [0] * self.world_size
        for owner, count in zip(self.ranks, rows, strict=True):
            level[owner] += count
        return level

    @cached_property
    def array(self) -> Ints:
        """:attr:`ranks` as int64 ``[E]``."""
        return np.asarray(self.ranks, dtype=np.int64)

    @cached_property
    def alone(self) -> tuple[tuple[int, ...], ...]:
        """The holders of each expert when nothing is replicated."""
        return tuple((rank,) for rank in self.ranks)

    @cached_property
    def counts(self) -> list[int]:
        """Number of experts that each rank owns, length W."""
        return [self.ranks.count(rank) for rank in range(self.world_size)]

    @cached_property
    def by_rank(self) -> Ints:
        """All experts, ordered by (owner, slot): int64 ``[E]``."""
        return np.argsort(self.array, kind="stable")

    @cached_property
    def in_order(self) -> bool:
        """Tell whether :attr:`by_rank` is 0, 1, 2, ...: shards joined in rank order are already the full tensor."""
        return list(self.ranks) == sorted(self.ranks)
