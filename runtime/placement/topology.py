"""Topology: ranks in nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hecate.runtime.placement.owners import Ints


@dataclass(frozen=True)
class Topology:
    """The node of each rank; links inside a node are fast, between nodes slow.

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
        """Return nodes of ``ranks_per_node`` consecutive ranks; the last may have fewer."""
        return cls(tuple(rank // ranks_per_node for rank in range(world_size)))

    def among(self, ranks: Sequence[int]) -> Topology:
        """Return which of ``ranks``, which are counted anew, share a node.

        >>> Topology((0, 0, 1, 1)).among([2, 3])
        Topology(node_of=(0, 0))
        """
        numbers = {node: number for number, node in enumerate(sorted({self.node_of[rank] for rank in ranks}))}
        return Topology(tuple(numbers[self.node_of[rank]] for rank in ranks))

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
    def node_bounds(self) -> Ints:
        """Where each node's ranks begin in :attr:`position`, and where the last one's end, int64 ``[N + 1]``."""
        return np.concatenate([[0], np.cumsum(self.node_sizes)])

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
        """Tell whether the ranks of each node follow one another."""
        return list(self.node_of) == sorted(self.node_of)

    def sum_nodes(self, values: Ints) -> Ints:
        """Add up the lines of each node's ranks: ``[W, n] -> [N, n]``."""
        ordered = values if self.in_order else values[np.argsort(self.position)]
        return np.add.reduceat(ordered, self.node_bounds[:-1], axis=0)

    def split_by_node(self, values: Ints) -> Ints:
        """Give each node's ranks a line of their own: ``[..., W] -> [..., N, most]``, zero behind the last rank."""
        padded = np.concatenate([values, np.zeros((*values.shape[:-1], 1), dtype=values.dtype)], axis=-1)
        return padded[..., self.node_lines]

    def join_nodes(self, lines: Ints) -> Ints:
        """Return the inverse of :meth:`split_by_node`: ``[n, N, most] -> [n, W]``."""
        joined = np.zeros((len(lines), self.world_size + 1), dtype=np.int64)
        joined[:, self.node_lines] = lines
        return joined[:, :-1]
