"""Find the part of a graph that computes with expert parameters: what lies between the cuts.

    rows, offsets ──▶ [ grouped_mm, activation, grouped_mm, biases by expert id ] ──▶ out

The search is anchored on the ``gather_experts`` nodes of one layer and walks outwards; it never looks for a
router or a top-k, which differ in every model. A layer that is called several times in a forward, as in models that
loop over their layers, has a region for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from hecate.passes.analysis.expert_numbers import COUNTED
from hecate.passes.analysis.rowwise import Kind, check_rowwise
from hecate.passes.analysis.torch_values import GraphFacts, shape_of, value_of
from hecate.passes.base import Refused
from hecate.passes.fx import (
    arg,
    between,
    calls,
    closure_backward,
    computed_from,
    describe,
    exits_of,
    is_getitem,
    reached,
)
from hecate.passes.match import ORDER, RANGE, call, casts, match, one_of, uncast


@dataclass(frozen=True, kw_only=True)
class Region:
    """The computation of a MoE layer in one call, on rows sorted by expert.

    Attributes:
        layer: id of the layer.
        gathers: the expert parameters in it, ``[E, ...]``.
        offsets: int ``[E]``, end of each expert's rows.
        ids: expert of each row, int ``[R]``; None if nothing is looked up by expert.
        lookups: the nodes ``parameter[ids]``, part of the body.
        entries: row tensors ``[R, ...]`` that flow in.
        body: the nodes between the cuts, in graph order: views of the parameters and operations on rows.
        exits: row tensors ``[R, ...]`` that flow out.
    """

    layer: int
    gathers: tuple[Node, ...]
    offsets: Node
    ids: Node | None
    lookups: tuple[Node, ...]
    entries: tuple[Node, ...]
    body: tuple[Node, ...]
    exits: tuple[Node, ...]

    def check_rows_apart(self) -> None:
        """Raise Refused unless every row of the exits depends on the same row of the entries alone."""
        kinds = dict.fromkeys(self.gathers, Kind.SLOTS) | dict.fromkeys(self.entries, Kind.ROWS)
        kinds[self.offsets] = Kind.OFFSETS
        if self.ids is not None:
            kinds[self.ids] = Kind.IDS
        check_rowwise(list(self.body), kinds, dict.fromkeys(self.exits, Kind.ROWS))


def find_regions(facts: GraphFacts, layer: int, gathers: Sequence[Node]) -> list[Region]:
    """Return the checked regions of one layer, one for each call, in graph order. Raises Refused."""
    slots = _slot_values(gathers)
    users = sorted({user for value in slots for user in value.users})
    matmuls = [n for n in users if _is_matmul(n, slots)]
    lookups = [n for n in users if _is_lookup(n, slots)]
    if not matmuls:
        first = sorted({user for gather in gathers for user in gather.users})
        where = describe(first[0]) if first else "nothing"
        raise Refused(
            f"no grouped matmul uses them; they go to {where}",
            first[0] if first else None,
            fix="docs/models.md has the spellings of expert matmuls that are known",
        )
    # Rows are sorted, and so counted, once in each call.
    calls_by_offsets: dict[Node, list[Node]] = {}
    for matmul in matmuls:
        calls_by_offsets.setdefault(arg(matmul, 2), []).append(matmul)
    lookups_of = _lookups_by_offsets(lookups, list(calls_by_offsets))
    regions = [
        _find_region(facts, layer, gathers, slots, offsets, of_call, lookups_of[offsets])
        for offsets, of_call in calls_by_offsets.items()
    ]
    results = {exit for region in regions for exit in region.exits}
    for region in regions:
        if not results.isdisjoint((*region.entries, region.offsets, region.ids)):
            raise Refused("the experts' results are rows of the same experts again, without being combined")
    return regions


def _lookups_by_offsets(lookups: Sequence[Node], offsets: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the lookups by expert id of each call."""
    found: dict[Node, list[Node]] = {of_call: [] for of_call in offsets}
    for lookup in lookups:
        ids = arg(lookup, 1)
        known = [of_call for of_call in offsets if _ids_match_offsets(ids, of_call)]
        if not known:
            raise Refused(f"cannot tell that {describe(ids)} is the expert of each sorted row", ids)
        found[known[0]].append(lookup)
    return found


def _find_region(
    facts: GraphFacts,
    layer: int,
    gathers: Sequence[Node],
    of_layer: set[Node],
    offsets: Node,
    matmuls: Sequence[Node],
    lookups: Sequence[Node],
) -> Region:
    """Return the region of one call, from its anchors: matmuls by expert and lookups by expert id."""
    # Step 1: what the anchors have in common.
    anchors = {*matmuls, *lookups}
    slots = reached(anchors, lambda node: [source for source in node.all_input_nodes if source in of_layer])
    if len({arg(lookup, 1) for lookup in lookups}) > 1:
        raise Refused("two different lookups by expert id")
    ids = arg(lookups[0], 1) if lookups else None

    # Step 2: the body is everything on a path from one anchor to another, and the views of the parameters.
    needed = anchors | _joins(matmuls, lookups)
    inside = needed | between(anchors, needed)
    if offsets in inside or (ids is not None and ids in inside):
        raise Refused("the routing depends on the experts' own result")
    body = sorted(inside | (slots - set(gathers)))
    used = tuple(g for g in gathers if any(u in inside or u in slots for u in g.users))
    entries = tuple(dict.fromkeys(arg(m, 0) for m in matmuls if arg(m, 0) not in inside))

    # Step 3: only rows, slots and values that all ranks have alike flow in, and nothing changes on the way.
    outside = {s for n in body for s in n.all_input_nodes} - set(body)
    facts.refuse_changes_of(outside | set(body), until=body[-1])
    own = sorted(n for n in outside - {*used, *entries, offsets, ids} if not facts.same_on_all_ranks(n))
    for node in own:
        if not _has_rows(node, matmuls[0]):
            raise Refused(
                f"{describe(node)} is computed from this rank's own tokens and used on rows of others",
                node,
                fix="compute it before the rows are sorted, and carry it as a column of each row; or apply it behind "
                "the experts",
            )
    # What is combined with rows, one for each, travels with them.
    entries += tuple(own)
    if any(user < offsets for lookup in lookups for user in lookup.users):
        raise Refused("biases are used before the rows of each expert are counted")
    facts.refuse_mixed_modes(inside, "between the expert matmuls")

    # Step 4: every row is computed on its own.
    region = Region(
        layer=layer,
        gathers=used,
        offsets=offsets,
        ids=ids,
        lookups=tuple(lookups),
        entries=entries,
        body=tuple(body),
        exits=tuple(exits_of(inside)),
    )
    region.check_rows_apart()
    return region


def _has_rows(node: Node, matmul: Node) -> bool:
    """Tell whether a value has an element or a vector for each row of a matmul."""
    rows, of_node = shape_of(matmul), shape_of(node)
    floats = rows and of_node and value_of(node).is_floating_point()
    return bool(floats) and statically_known_true(rows[0] == of_node[0])


def _slot_values(gathers: Sequence[Node]) -> set[Node]:
    """Return the gathers, and all nodes computed from them alone on the way to a matmul or a lookup by id."""
    slots = computed_from(gathers)
    ends = [n for value in slots for n in value.users if _is_matmul(n, slots) or _is_lookup(n, slots)]
    return slots & (closure_backward(ends, since=min(gathers)) | set(gathers))


def _joins(matmuls: Sequence[Node], lookups: Sequence[Node]) -> set[Node]:
    """Return the nodes where values that were looked up by expert meet the rows of a matmul."""
    multiplied, joins = set(matmuls), set[Node]()
    node = min((*matmuls, *lookups))
    # Users of looked-up values that have not been seen. When there are none, no further join can come.
    open_ends = {user for lookup in lookups for user in lookup.users}
    while open_ends:
        node = node.next
        met = node in multiplied or any(source in multiplied for source in node.all_input_nodes)
        if met:
            multiplied.add(node)
        if node in open_ends:
            open_ends.remove(node)
            if met:
                joins.add(node)
            else:
                open_ends |= set(node.users)
    return joins


def _is_matmul(node: Node, slots: set[Node]) -> bool:
    return calls(node, torch.ops.hecate.grouped_mm) and arg(node, 1) in slots


def _is_lookup(node: Node, slots: set[Node]) -> bool:
    """Tell whether a node is ``parameter[ids]`` with a tensor of ids."""
    return is_getitem(node) and arg(node, 0) in slots and isinstance(arg(node, 1), Node)


# Sorted ids, and the values of which they are the sorted form.
_SORTED = one_of(
    call("getitem", call("sort", "values", bind="sort"), 0, only=True),
    call("getitem", "values", casts(ORDER), only=True),
    call("values", one_of(0, -1), casts(ORDER), names=("gather", "index_select"), only=True),
)


def _ids_match_offsets(ids: Node, offsets: Node) -> bool:
    """Tell whether ``ids`` is sorted, and ``offsets`` says where each expert's part of it ends.

    Two forms are recognized: ids that group_expert_loops derives from the offsets themselves, and
    ``offsets = cumsum(counts)`` with ids repeated by these counts, or sorted ids that were counted, before or after.
    """
    if calls(ids, torch.ops.hecate.row_slots):
        return arg(ids, 0) is offsets
    summed = match(casts(call("cumsum", casts("counts"))), offsets)
    if summed is None:
        return False
    repeated = match(call("repeat_interleave", RANGE, casts("counts")), ids)
    if repeated is not None:
        return repeated["counts"] is summed["counts"]
    ordered, counted = match(_SORTED, ids), match(COUNTED, summed["counts"])
    if ordered is None or counted is None:
        return False
    sort = ordered["sort"]
    # Its flags are "descending" and "stable".
    if sort.kwargs.get("descending") or any(flag is True for flag in sort.args[1:]):
        return False
    return counted["ids"] in (uncast(ids), uncast(ordered["values"]))
