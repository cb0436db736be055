"""Ranks in nodes, and which rank holds which expert in one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Ints, Owners

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Topology:
    """Which node each rank is on; links inside a node are fast, between nodes slow.

    Attributes:
        node_of: node of each rank, length W, numbered from 0 without gaps.

    Raises:
        ValueError: the numbers have gaps, or there are none.
    """

    node_of: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "node_of", tuple(self.node_of))
        if not self.node_of or sorted(set(self.node_of)) != list(range(len(set(self.node_of)))):
            raise ValueError(f"hecate.Topology: nodes must be numbered 0, 1, ... without gaps, got {self.node_of}")

    @classmethod
    def even(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Nodes of ``ranks_per_node`` consecutive ranks; the last may have fewer."""
        return cls(tuple(rank // ranks_per_node for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    @cached_property
    def num_nodes(self) -> int:
        return max(self.node_of) + 1

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.node_of) if node == wanted)
            for wanted in range(self.num_nodes)
        )

    @cached_property
    def nodes(self) -> Ints:
        """:attr:`node_of` as an array, int64 ``[W]``."""
        return np.asarray(self.node_of, dtype=np.int64)

    @cached_property
    def node_sizes(self) -> Ints:
        """Ranks in each node, int64 ``[N]``."""
        return np.bincount(self.nodes)

    @cached_property
    def _node_starts(self) -> Ints:
        return np.cumsum(self.node_sizes) - self.node_sizes

    @cached_property
    def node_lines(self) -> Ints:
        """:attr:`members` as lines of equal length, int64 ``[N, most]``, filled up with the number W."""
        most = max(map(len, self.members))
        lines = [[*ranks, *[self.world_size] * (most - len(ranks))] for ranks in self.members]
        return np.asarray(lines, dtype=np.int64)

    @cached_property
    def position(self) -> Ints:
        """Place of each rank when ranks are ordered by (node, rank), int64 ``[W]``."""
        position = np.empty(self.world_size, dtype=np.int64)
        position[np.argsort(self.nodes, kind="stable")] = np.arange(self.world_size)
        return position

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks of each node follow one another."""
        return list(self.node_of) == sorted(self.node_of)

    def sum_nodes(self, values: Ints) -> Ints:
        """Add up the lines of each node's ranks: ``[W, n] -> [N, n]``."""
        ordered = values if self.in_order else values[np.argsort(self.position)]
        return np.add.reduceat(ordered, self._node_starts, axis=0)

    def split_by_node(self, values: Ints) -> Ints:
        """Give the ranks of each node a line of their own: ``[..., W] -> [..., N, most]``, zero where none is."""
        padded = np.concatenate([values, np.zeros((*values.shape[:-1], 1), dtype=values.dtype)], axis=-1)
        return padded[..., self.node_lines]

    def join_nodes(self, lines: Ints) -> Ints:
        """The inverse of :meth:`split_by_node`: ``[n, N, most] -> [n, W]``."""
        joined = np.zeros((len(lines), self.world_size + 1), dtype=np.int64)
        joined[:, self.node_lines] = lines
        return joined[:, :-1]


@dataclass(frozen=True, eq=False)
class Placement:
    """Which ranks hold which experts during one step: a superset of the owners (paper, section 4).

    Attributes:
        owners: who owns what.
        holders: the ranks that hold each expert, ascending; as its owner or with a replica.
    """

    owners: Owners
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def owned(cls, owners: Owners) -> Placement:
        """Owners only: nothing is materialized."""
        return cls(owners, owners.alone)

    @classmethod
    def with_replicas(cls, owners: Owners, replicas: list[set[int]]) -> Placement:
        """The owners and ``replicas``, the further ranks that hold each expert."""
        alone = owners.alone
        held = [tuple(sorted({*alone[e], *more})) if more else alone[e] for e, more in enumerate(replicas)]
        return cls(owners, tuple(held))

    @classmethod
    def from_matrix(cls, matrix: NDArray[np.integer]) -> Placement:
        """The inverse of :attr:`matrix`."""
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
    def matrix(self) -> NDArray[np.int8]:
        """int8 ``[E, W]``: 2 for the owner, 1 for a replica, 0 elsewhere."""
        matrix = np.zeros((self.owners.num_experts, self.owners.world_size), dtype=np.int8)
        matrix[self.pairs] = 1
        matrix[np.arange(len(matrix)), self.owner_array] = 2
        return matrix

    @property
    def owner_array(self) -> Ints:
        """The owner of each expert, int64 ``[E]``."""
        return self.owners.array

    @cached_property
    def num_replicas(self) -> int:
        """Expert copies that travel: the lambda * |C| of the paper's volume formula."""
        return sum(map(len, self.holders)) - len(self.holders)

    def includes(self, other: Placement) -> bool:
        """Whether every holder of ``other`` is one here, with the same owners."""
        return self.owners == other.owners and all(
            set(mine) >= set(theirs) for mine, theirs in zip(self.holders, other.holders, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.owners == other.owners and self.holders == other.holders

    def __hash__(self) -> int:
        return hash((self.owners, self.holders))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a step can afford.

    Attributes:
        overlap: t, how many experts' bytes the compute before the layer can hide.
        slots: m, how many replicas fit into a rank's memory beside its own experts.

    Raises:
        ValueError: a negative number.
    """

    overlap: int
    slots: int

    def __post_init__(self) -> None:
        if self.overlap < 0 or self.slots < 0:
            raise ValueError(f"Budget: overlap and slots must not be negative, got {self}")


def changes(values: Ints) -> Bools:
    """Whether each of ``values`` ``[n]`` differs from the one before; the first one does."""
    changed = np.empty(len(values), dtype=bool)
    changed[:1] = True
    np.not_equal(values[1:], values[:-1], out=changed[1:])
    return changed
