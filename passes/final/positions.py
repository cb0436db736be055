"""Positions at which nodes want to stand, and the order that results."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from torch.fx import Node

from hecate.passes.final.in_flight import InFlight
from hecate.passes.fx import is_getitem, is_view


class Phase(IntEnum):
    """Phases of the positions around a node: before it, in this order, at the node itself, and behind it.

    Between two nodes of the original order a wait comes first, then views of its results, and then, since the link is
    free from there on, the starts with the gap.
    """

    WAIT = 0  # for rows, counts or gradients
    WAIT_GATHER = 1  # for parameters: under way for longest, so waited for last
    START_BEHIND_WAIT = 2  # a gather that starts when an earlier one has been used
    VIEW = 3  # of a wait's results
    GAP = 4  # from here on the link is free
    START_GATHER = 5  # with the gap
    START_REDUCE = 6  # with the gap, behind the parameters
    NODE = 7  # the node
    START_READY = 8  # gradients that become ready inside a gap
    BEHIND_START = 9  # compute that hides the exchange that the node starts


class Key(NamedTuple):
    """The position at which a node wants to stand: original position, phase, and turn within it."""

    node: int
    phase: Phase = Phase.NODE
    turn: int = 0


@dataclass
class Plan:
    """The position of each node; nodes are sorted by it as far as data flow allows."""

    nodes: list[Node]
    key: dict[Node, Key] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.key = {node: Key(index) for index, node in enumerate(self.nodes)}

    @property
    def end(self) -> int:
        return len(self.nodes)

    def sink(self, one: InFlight) -> None:
        """Put a wait, and the views of its results, before the first node that really uses them."""
        views, use = [], self.end
        stack = [one.wait]
        while stack:
            for user in stack.pop().users:
                if is_getitem(user) or is_view(user):
                    views.append(user)
                    stack.append(user)
                elif user in self.key:
                    use = min(use, self.key[user].node)
        phase = Phase.WAIT_GATHER if one.role == "gather" else Phase.WAIT
        self.key[one.wait] = max(self.key[one.wait], Key(use, phase))
        for turn, view in enumerate(views):
            self.key[view] = max(self.key[view], Key(use, Phase.VIEW, turn))

    def sorted(self) -> list[Node]:
        """Return nodes by key, each after the nodes that it needs."""
        position = {node: index for index, node in enumerate(self.nodes)}
        missing = {node: sum(source in position for source in node.all_input_nodes) for node in self.nodes}
        ready = [(self.key[node], position[node]) for node in self.nodes if missing[node] == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            _, index = heapq.heappop(ready)
            node = self.nodes[index]
            order.append(node)
            for user in node.users:
                if user in missing:
                    missing[user] -= 1
                    if missing[user] == 0:
                        heapq.heappush(ready, (self.key[user], position[user]))
        return order
