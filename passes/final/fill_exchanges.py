"""Compute for the time in which rows travel: rules 5 and 6 of ``schedule``."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import islice, zip_longest

import torch
from torch.fx import Node

from hecate.passes.final.in_flight import InFlight, in_flight
from hecate.passes.final.node_cost import Clock, is_heavy
from hecate.passes.final.positions import Key, Phase, Plan
from hecate.passes.fx import is_foreign_collective, is_getitem, reached
from hecate.runtime.comm.collective import start_of, wait_of


def defer(plan: Plan, clock: Clock) -> None:
    """Do rule 5: move matmuls that the start of an exchange does not need behind it.

    The order of starts stays: a matmul does not move behind an exchange if a start before or at it needs the result.
    Where one exchange of a layer is filled, the next of the same layer takes the rest, and the last takes all that is
    left; so values that a matmul reads are kept for one layer longer at most.

    Counts of rows are small, and all ranks wait for the last rank's. So nodes between the router and the counts that
    are for later move behind their start, too: rows in the order of their experts, scores.
    """
    order = plan.sorted()
    position = {node: index for index, node in enumerate(order)}
    needed = _first_start_that_needs(order, plan)
    exchanges = [one for one in in_flight(order) if one.role == "exchange"]
    carried: list[Node] = []
    begin = 0
    for one, following in zip_longest(exchanges, exchanges[1:]):
        at, until = position[one.start], position[one.wait]
        here = plan.key[one.start].node
        # Matmuls of the layer before this one went behind its last exchange.
        drawn = _drawn_from(order[begin:at])
        waiting = carried + [
            node
            for node in order[begin:at]
            if is_heavy(node) and node not in drawn and needed.get(node, plan.end) > here
        ]
        left = clock.link_seconds(one.start, one.wait) - sum(map(clock.seconds, order[at + 1 : until]))
        if one.collective.carries == "counts":
            for turn in _beside_counts(order, begin, at, needed, here, drawn):
                plan.key[order[turn]] = Key(here, Phase.BEHIND_START, turn)
                left -= clock.seconds(order[turn])
        carried = []
        for node in waiting:
            if left <= 0 and _may_wait_for(following, one, needed.get(node, plan.end), plan):
                carried.append(node)
            else:
                left -= clock.seconds(node)
                plan.key[node] = Key(here, Phase.BEHIND_START, position[node])
        begin = at + 1
    _bring_along(order, plan)


def _beside_counts(
    order: Sequence[Node], begin: int, at: int, needed: Mapping[Node, int], here: int, drawn: Container[Node]
) -> list[int]:
    """Return positions of nodes between the router's matmul and the counts that only later starts need."""
    found, stays = [], set[Node]()
    for turn in reversed(range(begin, at)):
        node = order[turn]
        late = needed.get(node, here + 1) > here
        if is_heavy(node) and not late:
            break
        if is_getitem(node) and not node.users:
            continue
        has_effect = _is_half(node) or not node.users or node.is_impure()
        if not late or node in drawn or has_effect or not stays.isdisjoint(node.users):
            stays.add(node)
        elif not is_heavy(node):
            found.append(turn)
    return found


def _drawn_from(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes that keep their turn, and those that they need: held up, they would come after others."""
    found = set[Node]()
    for node in reversed(nodes):
        if _keeps_its_turn(node) or not found.isdisjoint(node.users):
            found.add(node)
    return found


def _may_wait_for(following: InFlight | None, one: InFlight, needed: int, plan: Plan) -> bool:
    return following is not None and following.layer == one.layer and needed > plan.key[following.start].node


def _first_start_that_needs(order: Sequence[Node], plan: Plan) -> dict[Node, int]:
    """Return, for each node that some collective needs, also a foreign one, where the first of them starts."""
    first: dict[Node, int] = {}
    for start in order:
        if start_of(start.target) is None and not is_foreign_collective(start):
            continue
        stack = [start]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source in plan.key and source not in first:
                    first[source] = plan.key[start].node
                    stack.append(source)
    return first


def _bring_along(order: Sequence[Node], plan: Plan) -> None:
    """Move nodes that only deferred nodes use with them, so that they do not delay the exchange either."""
    moved = {node for node in order if plan.key[node].phase is Phase.BEHIND_START}
    for turn, node in reversed(list(enumerate(order))):
        if _is_half(node) or node in moved or not node.users or _keeps_its_turn(node):
            continue
        if all(user in moved for user in node.users):
            first = min(plan.key[user] for user in node.users)
            plan.key[node] = max(plan.key[node], first._replace(turn=turn))
            moved.add(node)


def fill(order: list[Node], clock: Clock) -> list[Node]:
    """Do rule 6: move matmuls that come soon after a wait, and do not need it, before it."""
    position = {node: index for index, node in enumerate(order)}
    for one in in_flight(order):
        if one.role != "exchange":
            continue
        at = position[one.wait]
        inside = order[position[one.start] + 1 : at]
        left = clock.link_seconds(one.start, one.wait) - sum(map(clock.seconds, inside))
        moved = _movable(order, at, left, position, clock)
        if moved:
            # Only nodes between the wait and the last of them change their place.
            end, taken = max(position[node] for node in moved) + 1, set(moved)
            order[at:end] = [*moved, *(node for node in order[at:end] if node not in taken)]
            position.update((order[index], index) for index in range(at, end))
    return order


def _movable(order: Sequence[Node], at: int, left: float, position: dict[Node, int], clock: Clock) -> list[Node]:
    """Return matmuls behind the wait at position ``at``, with their sources, that take about ``left`` seconds."""
    blocked, moved, exchanges = {order[at]}, list[Node](), 0
    for node in islice(order, at + 1, None):
        started = start_of(node.target)
        exchanges += started is not None and started.role == "exchange"
        if left <= 0 or exchanges > 1:
            break
        if _is_half(node) or any(source in blocked for source in node.all_input_nodes):
            blocked.add(node)
        elif is_heavy(node):
            chain = sorted(_needed_after(node, at, position, moved), key=position.__getitem__)
            if any(map(_keeps_its_turn, chain)):
                continue
            needed = sum(map(clock.seconds, chain))
            # A matmul much longer than the transfer may fit a later one better.
            if needed > 2 * left:
                break
            moved += chain
            left -= needed
    return moved


def _needed_after(node: Node, at: int, position: dict[Node, int], moved: Sequence[Node]) -> set[Node]:
    """Return ``node`` and its sources among the nodes behind position ``at``, without those that moved already."""

    def sources(node: Node) -> list[Node]:
        return [source for source in node.all_input_nodes if position.get(source, -1) > at and source not in moved]

    return {node} | reached([node], sources)


def _is_half(node: Node) -> bool:
    """Tell whether a node is the start or the wait of a collective."""
    return start_of(node.target) is not None or wait_of(node.target) is not None


def _keeps_its_turn(node: Node) -> bool:
    """Tell whether a node's place among others of its kind must stay.

    Such nodes draw random numbers, also inside an operator with a state, or are collectives of the model's own: ranks
    along other meshes, which have other rates, must start these before and behind the same ones of ours.
    """
    if any(torch.Tag.nondeterministic_seeded in getattr(one, "tags", ()) for one in (node.target, *node.args)):
        return True
    return is_foreign_collective(node)
