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

Source: paper, section 4 (overlap); issue 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from hecate.passes.base import Outcome, PassContext
from hecate.passes.final.node_cost import Clock
from hecate.passes.fx import arguments_of, descendants, is_getitem, is_view, operator_of
from hecate.runtime.ops.registration import STARTS, WAITS


@dataclass
class Transfer:
    """A collective between its start and its wait."""

    start: Node
    wait: Node

    @property
    def role(self) -> str:
        return STARTS[operator_of(self.start)].role

    @property
    def layer(self) -> object:
        """The MoE layer that an exchange is of."""
        return arguments_of(self.start)["layer"]


@dataclass
class _Plan:
    """Where each node wants to stand: its key; nodes are sorted by it as far as data flow allows."""

    nodes: list[Node]
    key: dict[Node, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.key = {node: float(index) for index, node in enumerate(self.nodes)}

    def sink(self, transfer: Transfer) -> None:
        """Put a wait, and the views of its results, before the first node that really uses them.

        Of several waits for the same node those for parameters come last: they have been on their way for longest.
        """
        wait = transfer.wait
        views, use = [], float(len(self.nodes))
        stack = [wait]
        while stack:
            for user in stack.pop().users:
                if is_getitem(user) or is_view(user):
                    views.append(user)
                    stack.append(user)
                elif user in self.key:
                    use = min(use, self.key[user])
        self.key[wait] = max(self.key[wait], use - (0.45 if transfer.role == "gather" else 0.5))
        for turn, view in enumerate(views):
            self.key[view] = max(self.key[view], use - 0.4 + 0.001 * turn)


def schedule(gm: GraphModule, context: PassContext) -> Outcome:
    """Reorder the graph."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    transfers = transfers_of(nodes)
    if not transfers:
        return Outcome()
    clock = Clock(gm, context)
    plan = _Plan(nodes)
    sizes = {id(t): clock.bytes_in_flight(t.start, t.wait) for t in transfers if t.role != "exchange"}
    budget = context.prefetch_bytes if context.prefetch_bytes is not None else _two_layers(transfers, sizes)

    # Step 1: waits stand before their first use. Without room for anything on its way, only exchanges move.
    if budget == 0:
        transfers = [t for t in transfers if t.role == "exchange"]
    tails = _tails(transfers)
    for transfer in transfers:
        if transfer.role != "reduce" or transfer.wait not in tails:
            plan.sink(transfer)

    # Step 2: gathers and gradients go into gaps.
    gaps = _gaps(transfers, plan)
    _gather_ahead([t for t in transfers if t.role == "gather"], gaps, plan, sizes, budget)
    _send_gradients(
        [t for t in transfers if t.role == "reduce" and t.wait in tails], gaps, plan, tails, sizes, budget
    )

    # Step 3: compute moves in front of waits.
    output = next(node for node in gm.graph.nodes if node.op == "output")
    for node in _fill(_sorted(plan), clock):
        output.prepend(node)
    return Outcome(rewritten=len(transfers))


def _two_layers(transfers: Sequence[Transfer], sizes: dict[int, int]) -> int:
    """Room for twice the largest transfer; buckets of gradients are no measure where experts travel too."""
    found = [sizes[id(t)] for t in transfers if id(t) in sizes]
    sparse = [
        sizes[id(t)] for t in transfers
        if id(t) in sizes and t.start.target is not torch.ops.hecate.average_gradients_start.default
    ]  # fmt: skip
    return 2 * max(sparse or found, default=0)


def transfers_of(nodes: Iterable[Node]) -> list[Transfer]:
    """All split collectives, in the order of their starts."""
    waits = {node.args[0]: node for node in nodes if node.target in WAITS}
    return [Transfer(start, waits[start]) for start in nodes if start.target in STARTS and start in waits]


def _is_heavy(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _tails(transfers: Sequence[Transfer]) -> dict[Node, set[Node]]:
    """The waits for gradients that only lead to the graph's results, and what comes after each."""
    tails: dict[Node, set[Node]] = {}
    for transfer in transfers:
        if transfer.role == "reduce":
            after = descendants([transfer.wait])
            if not any(node.target in STARTS or _is_heavy(node) for node in after):
                tails[transfer.wait] = {node for node in after if node.op != "output"}
    return tails


@dataclass(frozen=True)
class _Gap:
    """The link is free from ``begin`` on, until ``end``; keys."""

    begin: float
    end: float


def _gaps(transfers: Sequence[Transfer], plan: _Plan) -> list[_Gap]:
    """Between the exchanges of one layer and those of the next; before the first, and after the last."""
    exchanges = [t for t in transfers if t.role == "exchange"]
    gaps, begin = [], -1.0
    for before, after in zip([None, *exchanges], [*exchanges, None], strict=True):
        end = plan.key[after.start] if after is not None else float(len(plan.nodes))
        if before is not None:
            begin = plan.key[before.wait] + 0.1
        if before is None or after is None or before.layer != after.layer:
            gaps.append(_Gap(begin, end))
    return gaps


def _gather_ahead(
    gathers: Sequence[Transfer], gaps: Sequence[_Gap], plan: _Plan, sizes: dict[int, int], budget: int
) -> None:
    """Rule 1."""
    flying: list[tuple[float, float, int]] = []
    uses: list[float] = []
    for turn, transfer in enumerate(sorted(gathers, key=lambda t: plan.key[t.wait])):
        needs = _closure(transfer.start)
        use, size = plan.key[transfer.wait], sizes[id(transfer)]
        begin = use
        if not any(node.target in WAITS or _is_heavy(node) for node in needs):
            # Where the memory is there: with the gap, or when an earlier one has been used.
            wanted = _begin(transfer, gaps, use)
            for candidate in sorted({wanted, *(other for other in uses if wanted < other < use)}):
                together = sum(other for start, end, other in flying if start < use and end > candidate)
                if together + size <= budget:
                    begin = candidate
                    break
        flying.append((begin, use, size))
        uses.append(use)
        key = begin + 0.001 * (turn + 1)
        if begin < use and key < plan.key[transfer.start]:
            plan.key[transfer.start] = key
            for node in needs:
                plan.key[node] = min(plan.key[node], key - 0.0005)


def _begin(transfer: Transfer, gaps: Sequence[_Gap], use: float) -> float:
    """Where a gather should start: experts with the gap before their layer, dense parameters a gap earlier.

    A layer's dense parameters are used at the beginning of its gap, where nothing would hide them.
    """
    before = [gap.begin for gap in gaps if gap.begin < use]
    ahead = 2 if transfer.start.target is torch.ops.hecate.gather_dense_start.default else 1
    return before[-ahead] if len(before) >= ahead else -1.0


def _closure(node: Node) -> set[Node]:
    """Everything that a node needs, except the graph's inputs."""
    found: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source not in found and source.op != "placeholder":
            found.add(source)
            stack.extend(source.all_input_nodes)
    return found


def _send_gradients(
    reduces: Sequence[Transfer], gaps: Sequence[_Gap], plan: _Plan, tails: dict[Node, set[Node]],
    sizes: dict[int, int], budget: int,
) -> None:  # fmt: skip
    """Rules 2 and 3."""
    end = float(len(plan.nodes))
    flying: list[Transfer] = []
    for turn, transfer in enumerate(sorted(reduces, key=lambda t: plan.key[t.start])):
        ready = plan.key[transfer.start]
        begins = [max(gap.begin, ready) for gap in gaps if gap.end > ready]
        # Behind the parameters that start with the same gap.
        start = plan.key[transfer.start] = (begins[0] if begins else end) + 0.05 + 0.0001 * turn
        flying.append(transfer)
        while len(flying) > 1 and sum(sizes[id(t)] for t in flying) > budget:
            _wait_at(flying.pop(0), start - 0.00005, plan, tails)
    for turn, transfer in enumerate(flying):
        _wait_at(transfer, end + 1.0 + turn, plan, tails)


def _wait_at(transfer: Transfer, key: float, plan: _Plan, tails: dict[Node, set[Node]]) -> None:
    plan.key[transfer.wait] = key
    for node in tails[transfer.wait]:
        plan.key[node] = max(plan.key[node], key)


def _sorted(plan: _Plan) -> list[Node]:
    """Nodes by key, each after what it needs."""
    place = {node: index for index, node in enumerate(plan.nodes)}
    missing = {node: sum(source in place for source in node.all_input_nodes) for node in plan.nodes}
    ready = [(plan.key[node], place[node]) for node in plan.nodes if missing[node] == 0]
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
                    heapq.heappush(ready, (plan.key[user], place[user]))
    return order


def _fill(order: list[Node], clock: Clock) -> list[Node]:
    """Rule 4: matmuls that come soon after a wait, and do not need it, come before it."""
    for transfer in [t for t in transfers_of(order) if t.role == "exchange"]:
        place = {node: index for index, node in enumerate(order)}
        at = place[transfer.wait]
        inside = order[place[transfer.start] + 1 : at]
        left = clock.transfer_seconds(transfer.start, transfer.wait) - sum(map(clock.seconds, inside))
        blocked = {transfer.wait}
        moved: list[Node] = []
        starts = 0
        for node in order[at + 1 :]:
            starts += node.target in STARTS and STARTS[node.target].role == "exchange"
            if left <= 0 or starts > 1:
                break
            if node.target in STARTS or node.target in WAITS or any(n in blocked for n in node.all_input_nodes):
                blocked.add(node)
            elif _is_heavy(node):
                chain = sorted(_needed_after(node, at, place, moved), key=place.__getitem__)
                # Random numbers keep their order.
                if any(torch.Tag.nondeterministic_seeded in _tags(n) for n in chain):
                    continue
                needed = sum(map(clock.seconds, chain))
                # What is much longer than the transfer may fit a later one better.
                if needed > 2 * left:
                    break
                moved += chain
                left -= needed
        if moved:
            taken = set(moved)
            rest = [node for node in order[at:] if node not in taken]
            order = [*order[:at], *moved, *rest]
    return order


def _needed_after(node: Node, at: int, place: dict[Node, int], moved: Sequence[Node]) -> set[Node]:
    """``node`` and what it needs of the nodes behind position ``at``, without those that moved already."""
    found, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if place.get(source, -1) > at and source not in found and source not in moved:
                found.add(source)
                stack.append(source)
    return found


def _tags(node: Node) -> list[torch.Tag]:
    return getattr(node.target, "tags", [])
