"""bucket_gathers: gather the sharded dense parameters of a block in one all-gather.

Needs    gather_dense([shard], [id], dtype) nodes, one or more per shard, and the names behind the ids.
Changes  a = gather_dense([p], [0], dtype)[0]; b = gather_dense([q], [1], dtype)[0]
         becomes   both = gather_dense([p, q], [0, 1], dtype); a = both[0]; b = both[1]
         A shard that is read twice (tied weights) is gathered once.
Never    mixes dtypes, devices, grad modes, or shards with and without gradients; touches a group of which a shard or
         a result is changed in place.

A block is the outermost numbered module, such as model.layers.3. Parameters outside of any are grouped by what lies
between the same two blocks, or bodies of checkpoints: the embedding before the first, the last norm and the head
after the last. A group is gathered where its first parameter is read. Its backward is one reduce-scatter, when all
its gradients are there.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts, value_of
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import Builder, arg, calls, is_getitem, operands, skip_of
from hecate.private import HigherOrderOperator
from hecate.runtime.ops.dense import DENSE_SHARDS
from hecate.runtime.ops.gradients import replicate

_BLOCK = re.compile(r"(?:^|.*?\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class _Read:
    """``gather_dense([shard], [id], dtype)[0]``: the operator's node, and the node that takes its only result."""

    gather: Node
    part: Node
    shard: Node
    parameter: Node  # the shard itself, or what is read through ``replicate`` for it, where several groups have it
    id: int
    dtype: torch.dtype | None


def bucket_gathers(gm: GraphModule, context: PassContext) -> Outcome:
    """Group the reads of each block at its first read."""
    groups, skipped, facts = 0, [], GraphFacts(gm.graph)
    end = next(iter(reversed(gm.graph.nodes)))
    for reads in _by_block(gm.graph, facts):
        if len(reads) == 1:
            continue
        try:
            # Results count, too: two reads that become one would see each other's changes.
            facts.refuse_changes_of([node for read in reads for node in (read.parameter, read.part)], until=end)
        except Refused as reason:
            skipped.append(skip_of(DENSE_SHARDS[reads[0].id].name, reason, fallback=False))
            continue
        _merge(reads)
        groups += 1
    return Outcome(rewritten=groups, skipped=tuple(skipped))


def _by_block(graph: Graph, facts: GraphFacts) -> list[list[_Read]]:
    """Return the reads of each group, in graph order."""
    groups: dict[Hashable, list[_Read]] = {}
    group_of: dict[Hashable, Hashable] = {}
    block: str | None = None
    passed = 0
    for node in graph.nodes:
        # A recomputed block is a graph of its own; reads before and after it still are of different groups.
        passed += isinstance(node.target, HigherOrderOperator)
        read = _read_at(node)
        if read is None:
            continue
        found = _BLOCK.match(DENSE_SHARDS[read.id].name)
        if found is not None and found.group() != block:
            block = found.group()
            passed += 1
        value = value_of(read.parameter)
        kind = (value.dtype, value.device, value.requires_grad, read.dtype, facts.grad_modes[node])
        # A second read of a shard belongs to the first, wherever it is.
        group = group_of.setdefault((read.parameter, kind), (block if found is not None else passed, kind))
        groups.setdefault(group, []).append(read)
    return list(groups.values())


def _read_at(node: Node) -> _Read | None:
    if not calls(node, torch.ops.hecate.gather_dense) or len(node.users) != 1:
        return None
    shards, ids, dtype = operands(node)
    (part,) = node.users
    if len(shards) != 1 or not is_getitem(part):
        return None
    parameter = arg(shards[0], 0) if calls(shards[0], replicate) else shards[0]
    if parameter.op != "placeholder" or value_of(parameter) is None:
        return None
    return _Read(gather=node, part=part, shard=shards[0], parameter=parameter, id=ids[0], dtype=dtype)


def _merge(reads: Sequence[_Read]) -> None:
    graph = reads[0].gather.graph
    firsts = list({read.parameter: read for read in reversed(reads)}.values())[::-1]
    for read in firsts:
        if read.shard is not read.parameter:
            reads[0].gather.prepend(read.shard)
    here = Builder(graph, before=reads[0].gather)
    shards, ids = [read.shard for read in firsts], [read.id for read in firsts]
    whole = here.call(torch.ops.hecate.gather_dense.default, shards, ids, reads[0].dtype)
    parts = dict(zip([read.parameter for read in firsts], here.parts(whole, len(shards)), strict=True))
    for read in firsts:
        parts[read.parameter].meta = dict(read.part.meta)
    for read in reads:
        read.part.replace_all_uses_with(parts[read.parameter])
        graph.erase_node(read.part)
        graph.erase_node(read.gather)
