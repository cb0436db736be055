"""schedule: start collectives early, wait for them late, and compute in between.

Needs    collectives split into start and wait.
Changes  the order of nodes, by these rules:
         1. Parameters are gathered ahead. A gap is where the link is free: between the last exchange of one MoE layer
            and the first of the next (attention, norms, gate). Experts come with the gap before their layer, sharded
            dense parameters a gap before the one that they are used in.
         2. Gradients leave with the first gap after they are ready, behind the parameters that are on their way.
            Dense ones that are ready when a gap's compute is over would be in the way of the next layer's exchanges:
            they leave with the gap behind these. Of two in a chain, a layer's to their owners and from these to
            their twins, the second leaves with the gap behind the first one's, where the first is waited for.
         3. A wait stands before its first use. That of a gradient, which only the optimizer uses, stands at the end,
            or where more than ``prefetch_bytes`` would be on their way.
         4. The chunks of a layer's rows start as soon as they are there.
         5. Matmuls that an exchange needs not for its start move behind it: the weight gradients of experts, which
            autograd puts in front of it, and dense ones. Behind the start of counts comes what stands between the
            router and them for later.
         6. Matmuls that do not need an exchange (shared experts) move before its wait, as many as fit into its
            predicted time.
Never    changes values; changes the order of starts by sizes that may differ between ranks.

Rules 1 to 4 see the structure of the graph and the sizes of parameters only, so ranks with other batches have the
same order; rules 5 and 6 move compute, which no other rank sees.

Source: paper, section 4 (overlap); for rule 5 Lancet (MLSys 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext
from hecate.passes.final.fill_exchanges import defer, fill
from hecate.passes.final.in_flight import InFlight, in_flight
from hecate.passes.final.node_cost import Clock, is_heavy
from hecate.passes.final.positions import Key, Phase, Plan
from hecate.passes.fx import closure_backward, closure_forward
from hecate.runtime.comm.collective import start_of, wait_of


def schedule(gm: GraphModule, context: PassContext) -> Outcome:
    """Reorder the graph."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    collectives = in_flight(nodes)
    if not collectives:
        return Outcome()
    clock = Clock(gm, context)
    plan = Plan(nodes)
    sizes = {one: clock.bytes_in_flight(one.start, one.wait) for one in collectives if one.role != "exchange"}
    budget = context.prefetch_bytes if context.prefetch_bytes is not None else _two_layers(sizes)

    # Step 1: waits stand before their first use. Without room for anything under way, only exchanges move.
    if budget == 0:
        collectives = [one for one in collectives if one.role == "exchange"]
    tails, next_of = _tails(collectives)
    for one in collectives:
        if one.role != "reduce" or one.wait not in tails:
            plan.sink(one)

    _start_chunks(collectives, plan)

    # Step 2: gathers and gradients go into gaps.
    gaps = _gaps(collectives, plan)
    _gather_ahead([one for one in collectives if one.role == "gather"], gaps, plan, sizes, budget)
    reduces = [one for one in collectives if one.role == "reduce" and one.wait in tails]
    _send_gradients(reduces, gaps, plan, tails, next_of, sizes, budget)

    # Step 3: compute moves behind the starts of exchanges, and in front of their waits.
    defer(plan, clock)
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    for node in fill(plan.sorted(), clock):
        output.prepend(node)
    return Outcome(rewritten=len(collectives))


def _two_layers(sizes: dict[InFlight, int]) -> int:
    """Return room for twice the largest transfer; buckets of gradients are no measure where experts travel too."""
    experts = [size for one, size in sizes.items() if one.collective.carries not in ("bucket", "fractions")]
    return 2 * max(experts or sizes.values(), default=0)


def _tails(
    collectives: Sequence[InFlight],
) -> tuple[dict[Node, set[Node]], dict[InFlight, list[InFlight]]]:
    """Return the waits for gradients that only lead to the graph's results, and the nodes after each.

    Of a chain these end where the next ones start, which are returned, too: those that send on what arrives.
    """
    reduces = {one.start: one for one in collectives if one.role == "reduce"}
    tails: dict[Node, set[Node]] = {}
    next_of: dict[InFlight, list[InFlight]] = {}
    # The last of a chain first.
    for one in reversed(list(reduces.values())):
        after = closure_forward([one.wait])
        following = [reduces[node] for node in after if node in reduces]
        if following and all(other.wait in tails for other in following):
            starts = [other.start for other in following]
            after -= {*starts, *closure_forward(starts)}
            next_of[one] = following
        if not any(start_of(node.target) is not None or is_heavy(node) for node in after):
            tails[one.wait] = {node for node in after if node.op != "output"}
    return tails, {one: following for one, following in next_of.items() if one.wait in tails}


def _exchanges(collectives: Sequence[InFlight], plan: Plan) -> list[InFlight]:
    """Return the exchanges in the order of their starts."""
    return sorted((one for one in collectives if one.role == "exchange"), key=lambda one: plan.key[one.start])


def _start_chunks(collectives: Sequence[InFlight], plan: Plan) -> None:
    """Do rule 4: start all exchanges after a layer's first as soon as their rows are there."""
    rows = [one for one in _exchanges(collectives, plan) if one.collective.carries == "rows"]
    many = Counter((one.layer, one.collective.name) for one in rows)
    for turn, (before, one) in enumerate(pairwise(rows)):
        if before.layer == one.layer and many[one.layer, one.collective.name] > 1:
            there = [plan.key[node].node for node in one.start.all_input_nodes if node in plan.key]
            ready = Key(max([*there, plan.key[before.start].node]), Phase.START_READY, turn)
            plan.key[one.start] = min(plan.key[one.start], ready)


@dataclass(frozen=True)
class _Gap:
    """A gap: the link is free from ``begin`` to ``end``, where ``exchange`` starts; None at the end of the graph."""

    begin: Key
    end: Key
    exchange: InFlight | None


def _gaps(collectives: Sequence[InFlight], plan: Plan) -> list[_Gap]:
    """Return the gaps between exchanges of one layer and of the next, before the first and after the last."""
    exchanges = _exchanges(collectives, plan)
    gaps, begin = [], Key(-1, Phase.GAP)
    for before, after in zip([None, *exchanges], [*exchanges, None], strict=True):
        if before is not None:
            begin = Key(plan.key[before.wait].node, Phase.GAP)
        if before is None or after is None or before.layer != after.layer:
            gaps.append(_Gap(begin, plan.key[after.start] if after is not None else Key(plan.end), after))
    return gaps


def _gather_ahead(
    gathers: Sequence[InFlight], gaps: Sequence[_Gap], plan: Plan, sizes: dict[InFlight, int], budget: int
) -> None:
    """Do rule 1: start a gather where the memory is free, with its gap or when an earlier one has been used."""
    flying: list[tuple[Key, Key, int]] = []
    uses: list[Key] = []
    for turn, one in enumerate(sorted(gathers, key=lambda one: plan.key[one.wait])):
        needs = {node for node in closure_backward([one.start]) if node.op != "placeholder"}
        use, size = plan.key[one.wait], sizes[one]
        begin = use
        if not any(wait_of(node.target) is not None or is_heavy(node) for node in needs):
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
    """Return where a gather should start: as many gaps before its use as its record says."""
    before = [gap.begin for gap in gaps if gap.begin < use]
    ahead = one.collective.gaps_ahead
    return before[-ahead] if len(before) >= ahead else gaps[0].begin


def _send_gradients(
    reduces: Sequence[InFlight],
    gaps: Sequence[_Gap],
    plan: Plan,
    tails: dict[Node, set[Node]],
    next_of: dict[InFlight, list[InFlight]],
    sizes: dict[InFlight, int],
    budget: int,
) -> None:
    """Do rules 2 and 3: start gradients in gaps, and wait for them late.

    Of a chain the first is not counted as under way: it is waited for one gap later.
    """
    waited: set[InFlight] = set()
    for turn, one in enumerate(sorted(reduces, key=lambda one: plan.key[one.start])):
        firsts = [first for first in reduces if one in next_of.get(first, ())]
        ready = max(plan.key[start] for start in (one.start, *(first.start for first in firsts)))
        left = [gap for gap in gaps if (gap.begin if firsts else gap.end) > ready]
        if left and left[0].exchange is not None:
            since = max(ready, left[0].begin) if firsts else ready
            if _would_hold_up(one, since, left[0].exchange, plan):
                del left[0]
        begin = max(left[0].begin, ready) if left else Key(plan.end)
        phase = Phase.START_REDUCE if begin.phase is Phase.GAP else Phase.START_READY
        plan.key[one.start] = Key(begin.node, phase, 2 * turn + 1)
        for first in firsts:
            if first not in waited:
                waited.add(first)
                _wait_at(first, Key(begin.node, phase, 2 * turn), plan, tails)
    flying: list[InFlight] = []
    for one in sorted((one for one in reduces if one not in next_of), key=lambda one: plan.key[one.start]):
        start = plan.key[one.start]
        flying.append(one)
        while len(flying) > 1 and sum(sizes[other] for other in flying) > budget:
            _wait_at(flying.pop(0), start._replace(turn=start.turn - 1), plan, tails)
    for turn, one in enumerate(flying):
        _wait_at(one, Key(plan.end + 1 + turn), plan, tails)


def _would_hold_up(one: InFlight, ready: Key, exchange: InFlight, plan: Plan) -> bool:
    """Tell whether a dense gradient would delay the exchange, as no matmul is left to hide it before."""
    if one.collective.carries != "bucket":
        return False
    left = plan.nodes[ready.node : plan.key[exchange.start].node]
    # Only the part in between of what the exchange needs: all of it would be most of the graph, for each bucket.
    needed = closure_backward([exchange.start], since=left[0]) if left else set()
    return not any(is_heavy(node) for node in left if node in needed)


def _wait_at(one: InFlight, key: Key, plan: Plan, tails: dict[Node, set[Node]]) -> None:
    plan.key[one.wait] = key
    for node in tails[one.wait]:
        plan.key[node] = max(plan.key[node], key)
