"""bucket_gradients: average the gradients of many dense parameters in one all-reduce.

Needs    replicate(parameter, id) nodes, one or more per parameter read.
Changes  a = replicate(p, 0); b = replicate(q, 1)
         becomes   bucket = replicate_bucket([p, q], [0, 1]); a = bucket[0]; b = bucket[1]
         A parameter that is read twice (tied weights) is averaged once.
Never    mixes dtypes, devices or the ranks that average in a bucket, or merges across a change of grad mode. A
         parameter that the graph changes in place stays as it is: autograd takes no view of a custom function from
         before the change.

The experts of a layer, which several groups of ranks have, are one bucket. All others fill from the last parameter
used to the first, the order in which gradients become ready. A bucket stands at its first use, so that autograd runs
its all-reduce as soon as the last of its gradients is there.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts, storage_of, value_of
from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, arg, calls
from hecate.runtime.ops.gradients import REPLICATED, ReplicatedParameter, replicate, replicate_bucket

BUCKET_BYTES = 25 * 2**20


def bucket_gradients(gm: GraphModule, context: PassContext) -> Outcome:
    """Group the reads of each bucket at its first read."""
    reads = _reads_with_grad(gm)
    parameters = [node for node in reads if value_of(node) is not None]
    parameters.reverse()
    buckets: list[list[Node]] = []
    kind = {parameter: _kind(parameter, REPLICATED[arg(reads[parameter][0], 1)]) for parameter in parameters}
    for _, group in groupby(sorted(parameters, key=lambda p: str(kind[p])), key=kind.__getitem__):
        same = list(group)
        # The lengths of experts' shards are not known.
        buckets += _fill(same) if kind[same[0]].layer is None else [same]
    for bucket in buckets:
        _merge(bucket, reads)
    return Outcome(rewritten=len(buckets))


def _reads_with_grad(gm: GraphModule) -> dict[Node, list[Node]]:
    """Return the replicate nodes of each placeholder through which gradients flow, in order of first use."""
    facts = GraphFacts(gm.graph)
    changed = {storage for _, storage in facts.changes}
    reads: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        read = calls(node, replicate) and facts.grad_modes[node] and node.users and arg(node, 0).op == "placeholder"
        if read and storage_of(node) not in changed:
            reads.setdefault(arg(node, 0), []).append(node)
    return reads


class _Kind(NamedTuple):
    """What parameters of a bucket have in common."""

    dtype: torch.dtype
    device: torch.device
    ranks: tuple[int, ...] | None
    layer: int | None


def _kind(parameter: Node, record: ReplicatedParameter) -> _Kind:
    value = value_of(parameter)
    return _Kind(value.dtype, value.device, record.sync.world.numbers, record.layer)


def _fill(parameters: list[Node]) -> list[list[Node]]:
    buckets: list[list[Node]] = [[]]
    size = 0
    for parameter in parameters:
        value = value_of(parameter)
        if buckets[-1] and size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += value.numel() * value.element_size()
    return [bucket for bucket in buckets if bucket]


def _merge(bucket: list[Node], reads: dict[Node, list[Node]]) -> None:
    first = min(read for parameter in bucket for read in reads[parameter])
    ids = [arg(reads[parameter][0], 1) for parameter in bucket]
    here = Builder(first.graph, before=first)
    parts = here.parts(here.call(replicate_bucket, list(bucket), ids), len(bucket))
    for parameter, part in zip(bucket, parts, strict=True):
        part.meta = dict(reads[parameter][0].meta)
        for read in reads[parameter]:
            read.replace_all_uses_with(part)
            read.graph.erase_node(read)
