"""schedule: start collectives early, wait for them late, and compute in between.

Needs    collectives split into start and wait.
Changes  the order of nodes, by four rules:
         1. Parameters are gathered ahead. A gap is where the link is free: between the last exchange of one MoE layer
            and the first of the next (attention, norms, gate). Experts come with the gap before their layer, sharded
            dense parameters a gap before the one that they are used in.
         2. Gradients leave with the first gap after they are ready, behind the parameters that are on their way.
         3. A wait stands before its first use. That of a gradient, which only the optimizer uses, stands at the end,
            or where more than ``prefetch_bytes`` would be on their way.
         4. Matmuls that do not need an exchange (shared experts, weight gradients) move before its wait, as many as
            fit into its predicted time.
Never    changes values; changes the order of starts by sizes that may differ between ranks.

Rules 1 to 3 see the structure of the graph and the sizes of parameters only, so ranks with other batches have the
same order; rule 4 moves compute, which no other rank sees.

Source: paper, section 4 (overlap).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from hecate.passes.base import Outcome, PassContext
from hecate.passes.final.aten_values import arguments_of
from hecate.passes.final.node_cost import Clock
from hecate.passes.fx import closure_backward, closure_forward, is_getitem, is_view
from hecate.runtime.comm.collective import Collective, start_of, wait_of


class Phase(IntEnum):
    """What may stand before a node, in this order; the node itself; and what may stand behind it.

    Between two nodes of the original order a wait comes first, then views of its results, and then, since the link
    is free from there on, what starts with the gap.
    """

    WAIT = 0  # for rows, counts or gradients
    WAIT_GATHER = 1  # for parameters: on their way for longest, so waited for last
    START_BEHIND_WAIT = 2  # a gather that starts when an earlier one has been used
    VIEW = 3  # of a wait's results
    GAP = 4  # from here on the link is free
    START_GATHER = 5  # with the gap
    START_REDUCE = 6  # with the gap, behind the parameters
    NODE = 7  # the node
    START_READY = 8  # gradients that become ready inside a gap


class Key(NamedTuple):
    """Where a node wants to stand.

    Attributes:
        node: position in the original order.
        phase: before, at or behind it.
        turn: among those of one phase.
    """

    node: int
    phase: Phase = Phase.NODE
    turn: int = 0


@dataclass(eq=False)
class InFlight:
    """A collective between its start and its wait."""

    start: Node
    wait: Node
    collective: Collective

    @property
    def role(self) -> str:
        return self.collective.role

    @property
    def layer(self) -> object:
        """The MoE layer that an exchange is of."""
        return arguments_of(self.start)["layer"]


@dataclass
class _Plan:
    """Where each node wants to stand; nodes are sorted by it as far as data flow allows."""

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


def schedule(gm: GraphModule, context: PassContext) -> Outcome:
    """Reorder the graph."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    collectives = in_flight(nodes)
    if not collectives:
        return Outcome()
    clock = Clock(gm, context)
    plan = _Plan(nodes)
    sizes = {one: clock.bytes_in_flight(one.start, one.wait) for one in collectives if one.role != "exchange"}
    budget = context.prefetch_bytes if context.prefetch_bytes is not None else _two_layers(sizes)

    # Step 1: waits stand before their first use. Without room for anything on its way, only exchanges move.
    if budget == 0:
        collectives = [one for one in collectives if one.role == "exchange"]
    tails = _tails(collectives)
    for one in collectives:
        if one.role != "reduce" or one.wait not in tails:
            plan.sink(one)

    # Step 2: gathers and gradients go into gaps.
    gaps = _gaps(collectives, plan)
    _gather_ahead([one for one in collectives if one.role == "gather"], gaps, plan, sizes, budget)
    reduces = [one for one in collectives if one.role == "reduce" and one.wait in tails]
    _send_gradients(reduces, gaps, plan, tails, sizes, budget)

    # Step 3: compute moves in front of waits.
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    for node in _fill(_sorted(plan), clock):
        output.prepend(node)
    return Outcome(rewritten=len(collectives))


def in_flight(nodes: Iterable[Node]) -> list[InFlight]:
    """All split collectives, in the order of their starts."""
    nodes = list(nodes)
    waits = {node.args[0]: node for node in nodes if wait_of(node.target) is not None}
    found = ((start, waits.get(start), start_of(start.target)) for start in nodes)
    return [InFlight(start, wait, one) for start, wait, one in found if wait is not None and one is not None]


def _two_layers(sizes: dict[InFlight, int]) -> int:
    """Room for twice the largest transfer; buckets of gradients are no measure where experts travel too."""
    experts = [size for one, size in sizes.items() if one.collective.carries != "bucket"]
    return 2 * max(experts or sizes.values(), default=0)


def _is_heavy(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _tails(collectives: Sequence[InFlight]) -> dict[Node, set[Node]]:
    """The waits for gradients that only lead to the graph's results, and what comes after each."""
    tails: dict[Node, set[Node]] = {}
    for one in collectives:
        if one.role == "reduce":
            after = closure_forward([one.wait])
            if not any(start_of(node.target) is not None or _is_heavy(node) for node in after):
                tails[one.wait] = {node for node in after if node.op != "output"}
    return tails


@dataclass(frozen=True)
class _Gap:
    """The link is free from ``begin`` on, until ``end``."""

    begin: Key
    end: Key


def _gaps(collectives: Sequence[InFlight], plan: _Plan) -> list[_Gap]:
    """Between the exchanges of one layer and those of the next; before the first, and after the last."""
    exchanges = [one for one in collectives if one.role == "exchange"]
    gaps, begin = [], Key(-1, Phase.GAP)
    for before, after in zip([None, *exchanges], [*exchanges, None], strict=True):
        if before is not None:
            begin = Key(plan.key[before.wait].node, Phase.GAP)
        if before is None or after is None or before.layer != after.layer:
            gaps.append(_Gap(begin, plan.key[after.start] if after is not None else Key(plan.end)))
    return gaps


def _gather_ahead(
    gathers: Sequence[InFlight], gaps: Sequence[_Gap], plan: _Plan, sizes: dict[InFlight, int], budget: int
) -> None:
    """Rule 1: a gather starts where the memory is there, with its gap or when an earlier one has been used."""
    flying: list[tuple[Key, Key, int]] = []
    uses: list[Key] = []
    for turn, one in enumerate(sorted(gathers, key=lambda one: plan.key[one.wait])):
        needs = {node for node in closure_backward([one.start]) if node.op != "placeholder"}
        use, size = plan.key[one.wait], sizes[one]
        begin = use
        if not any(wait_of(node.target) is not None or _is_heavy(node) for node in needs):
            wanted = _gap_before(one, gaps, use)
            for candidate in sorted({wanted, *(other for other in uses if wanted < other < use)}):
                together = sum(other for start, end, other in flying if start < use and end > candidate)
                if together + size <= budget:
                    begin = candidate
                    break
        flying.append((begin, use, size))
        uses.append(use)
        phase = Phase.START_GATHER if begin.phase is Phase.GAP else Phase.START_BEHIND_WAIT
        key = Key(begin.node, phase, 2 * turn + 1)
        if begin < use and key < plan.key[one.start]:
            plan.key[one.start] = key
            for node in needs:
                plan.key[node] = min(plan.key[node], key._replace(turn=2 * turn))


def _gap_before(one: InFlight, gaps: Sequence[_Gap], use: Key) -> Key:
    """Where a gather should start: so many gaps before its use as its record says."""
    before = [gap.begin for gap in gaps if gap.begin < use]
    ahead = one.collective.gaps_ahead
    return before[-ahead] if len(before) >= ahead else gaps[0].begin


def _send_gradients(
    reduces: Sequence[InFlight], gaps: Sequence[_Gap], plan: _Plan, tails: dict[Node, set[Node]],
    sizes: dict[InFlight, int], budget: int,
) -> None:  # fmt: skip
    """Rules 2 and 3."""
    flying: list[InFlight] = []
    for turn, one in enumerate(sorted(reduces, key=lambda one: plan.key[one.start])):
        ready = plan.key[one.start]
        begin = next((max(gap.begin, ready) for gap in gaps if gap.end > ready), Key(plan.end))
        phase = Phase.START_REDUCE if begin.phase is Phase.GAP else Phase.START_READY
        start = plan.key[one.start] = Key(begin.node, phase, 2 * turn + 1)
        flying.append(one)
        while len(flying) > 1 and sum(sizes[other] for other in flying) > budget:
            _wait_at(flying.pop(0), start._replace(turn=2 * turn), plan, tails)
    for turn, one in enumerate(flying):
        _wait_at(one, Key(plan.end + 1 + turn), plan, tails)


def _wait_at(one: InFlight, key: Key, plan: _Plan, tails: dict[Node, set[Node]]) -> None:
    plan.key[one.wait] = key
    for node in tails[one.wait]:
        plan.key[node] = max(plan.key[node], key)


def _sorted(plan: _Plan) -> list[Node]:
    """Nodes by key, each after what it needs."""
    position = {node: index for index, node in enumerate(plan.nodes)}
    missing = {node: sum(source in position for source in node.all_input_nodes) for node in plan.nodes}
    ready = [(plan.key[node], position[node]) for node in plan.nodes if missing[node] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        node = plan.nodes[index]
        order.append(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready, (plan.key[user], position[user]))
    return order


def _fill(order: list[Node], clock: Clock) -> list[Node]:
    """Rule 4: matmuls that come soon after a wait, and do not need it, come before it."""
    position = {node: index for index, node in enumerate(order)}
    for one in in_flight(order):
        if one.role != "exchange":
            continue
        at = position[one.wait]
        inside = order[position[one.start] + 1 : at]
        left = clock.link_seconds(one.start, one.wait) - sum(map(clock.seconds, inside))
        moved = _movable(order, at, left, position, clock)
        if moved:
            # Only what lies between the wait and the last of them changes its place.
            end, taken = max(position[node] for node in moved) + 1, set(moved)
            order[at:end] = [*moved, *(node for node in order[at:end] if node not in taken)]
            position.update((order[index], index) for index in range(at, end))
    return order


def _movable(order: Sequence[Node], at: int, left: float, position: dict[Node, int], clock: Clock) -> list[Node]:
    """Matmuls behind the wait at position ``at``, and what they need, that take about ``left`` seconds."""
    blocked, moved, exchanges = {order[at]}, list[Node](), 0
    for node in islice(order, at + 1, None):
        started = start_of(node.target)
        exchanges += started is not None and started.role == "exchange"
        if left <= 0 or exchanges > 1:
            break
        is_half = started is not None or wait_of(node.target) is not None
        if is_half or any(source in blocked for source in node.all_input_nodes):
            blocked.add(node)
        elif _is_heavy(node):
            chain = sorted(_needed_after(node, at, position, moved), key=position.__getitem__)
            # Random numbers keep their order.
            if any(torch.Tag.nondeterministic_seeded in _tags(n) for n in chain):
                continue
            needed = sum(map(clock.seconds, chain))
            # What is much longer than the transfer may fit a later one better.
            if needed > 2 * left:
                break
            moved += chain
            left -= needed
    return moved


def _needed_after(node: Node, at: int, position: dict[Node, int], moved: Sequence[Node]) -> set[Node]:
    """``node`` and what it needs of the nodes behind position ``at``, without those that moved already."""
    found, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if position.get(source, -1) > at and source not in found and source not in moved:
                found.add(source)
                stack.append(source)
    return found


def _tags(node: Node) -> list[torch.Tag]:
    return getattr(node.target, "tags", [])
