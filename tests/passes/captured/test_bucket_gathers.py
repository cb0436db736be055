from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from hecate.passes import PassContext
from hecate.passes.captured.bucket_gathers import bucket_gathers
from hecate.passes.captured.share_gathers import share_gathers
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.ops.dense import add_dense_shard
from hecate.runtime.ops.gradients import GradientSync, add_replicated, replicate
from tests.support.graphs import E, GraphUnderTest, H, apply, leaves_alone, number_of, targets

CONTEXT = PassContext(world_size=1)


class Reads:
    """Reads of named parameters ``[3]``, of which this process has the only shard."""

    def __init__(self) -> None:
        self.g = GraphUnderTest()
        self.ids: dict[Node, int] = {}

    def shard(self, name: str, dtype: torch.dtype = torch.float32, *, frozen: bool = False) -> Node:
        node = self.g.input(torch.nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=not frozen))
        self.ids[node] = number_of(add_dense_shard(name, torch.Size((3,)), GradientSync(SINGLE)))
        return node

    def read(self, shard: Node, dtype: torch.dtype | None = None, *, twins: bool = False) -> Node:
        if twins:
            module = torch.nn.Linear(3, 1, bias=False)
            id = number_of(add_replicated(module, "weight", GradientSync(SINGLE)))
            here, shard = shard, self.g.call(replicate, shard, id)
            self.ids[shard] = self.ids[here]
        whole = self.g.call(torch.ops.hecate.gather_dense, [shard], [self.ids[shard]], dtype)
        return self.g.call(operator.getitem, whole, 0)

    def sum(self, reads: Sequence[Node]) -> GraphModule:
        total = reads[0]
        for read in reads[1:]:
            total = self.g.call(operator.add, total, read)
        return self.g.finish(total)


def _gathers(gm: GraphModule) -> list[int]:
    """How many shards each gather has."""
    return [len(node.args[0]) for node in gm.graph.nodes if "gather_dense" in str(node.target)]


def test_blocks_are_gathered_at_once_at_their_first_read() -> None:
    r = Reads()
    names = (
        "model.embed.weight",
        "model.layers.0.a",
        "model.layers.0.experts.1.b",
        "model.layers.10.a",
        "model.layers.1.a",
        "model.layers.10.b",
        "model.norm.weight",
        "lm_head.weight",
    )
    gm = r.sum([r.read(r.shard(name)) for name in names])
    assert apply(bucket_gathers, r.g, gm).rewritten == 3
    assert _gathers(gm) == [1, 2, 2, 1, 2]
    ids = [node.args[1] for node in gm.graph.nodes if "gather_dense" in str(node.target)]
    start = ids[0][0]
    assert [[id - start for id in group] for group in ids] == [[0], [1, 2], [3, 5], [4], [6, 7]]


def test_tied_reads_are_gathered_once() -> None:
    r = Reads()
    embedding, layer = r.shard("embed.weight"), r.shard("layers.0.weight")
    gm = r.sum([r.read(embedding), r.read(layer), r.read(embedding)])
    assert apply(bucket_gathers, r.g, gm).rewritten == 1
    assert _gathers(gm) == [1, 1]


def test_shards_of_several_groups_are_gathered_at_once() -> None:
    r = Reads()
    a, b = r.shard("layers.0.a"), r.shard("layers.0.b")
    gm = r.sum([r.read(a, twins=True), r.read(b, twins=True), r.read(a, twins=True)])
    assert apply(bucket_gathers, r.g, gm).rewritten == 1
    assert _gathers(gm) == [2]


def test_kinds_stay_apart() -> None:
    r = Reads()
    plain, other = r.shard("layers.0.a"), r.shard("layers.0.b")
    reads = [r.read(plain), r.read(other), r.read(r.shard("layers.0.c", torch.float64))]
    reads += [r.read(r.shard("layers.0.d", frozen=True)), r.read(other, torch.bfloat16)]
    gm = r.sum(reads)
    assert bucket_gathers(gm, CONTEXT).rewritten == 1
    assert _gathers(gm) == [2, 1, 1, 1]


def test_not_between_grad_modes() -> None:
    r = Reads()
    a, b = r.shard("layers.0.a"), r.shard("layers.0.b")
    loud = r.read(a)
    r.g.call(torch._C._set_grad_enabled, False)
    quiet = r.read(b)
    r.g.call(torch._C._set_grad_enabled, True)
    leaves_alone(bucket_gathers, r.g, r.sum([loud, quiet]))


def test_single_and_unused_reads_are_left_alone() -> None:
    r = Reads()
    a, b = r.shard("layers.0.a"), r.shard("layers.0.b")
    r.g.call(torch.ops.hecate.gather_dense, [a], [r.ids[a]], None)
    leaves_alone(bucket_gathers, r.g, r.sum([r.read(b)]))


def test_not_when_something_changes_a_shard_or_a_result() -> None:
    for changed in ("shard", "result"):
        r = Reads()
        a, b = r.shard("layers.0.a"), r.shard("layers.0.b")
        reads = [r.read(a)]
        r.g.method("add_", a if changed == "shard" else reads[0], 1.0)
        gm = r.sum([*reads, r.read(b), r.read(a)])
        outcome = bucket_gathers(gm, CONTEXT)
        assert outcome.rewritten == 0
        assert outcome.skipped[0].where == "layers.0.a" and "in-place add_" in outcome.skipped[0].reason
        assert not outcome.skipped[0].fallback


def test_second_read_becomes_the_first(g: GraphUnderTest) -> None:
    shard = g.input(torch.randn(E, H))
    first, second = (g.call(torch.ops.hecate.gather_experts, shard, E, g.layer) for _ in range(2))
    gm = g.finish(g.call(operator.add, first, second))
    assert apply(share_gathers, g, gm).rewritten == 1
    assert targets(gm).count("gather_experts") == 1


def test_equal_casts_are_shared_and_others_are_not(g: GraphUnderTest) -> None:
    shard = g.input(torch.randn(E, H))
    reads = [
        g.call(torch.ops.hecate.gather_experts, g.method("to", shard, dtype), E, g.layer)
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)
    ]
    gm = g.finish(g.call(operator.add, g.call(operator.add, reads[0], reads[1]), reads[2]))
    assert apply(share_gathers, g, gm).rewritten == 1
    assert targets(gm).count("to") == 2


def test_reads_for_twins_are_shared_where_they_are_of_one_record(g: GraphUnderTest) -> None:
    module = torch.nn.Linear(3, 1, bias=False)
    ids = [number_of(add_replicated(module, "weight", GradientSync(SINGLE), layer=n)) for n in range(2)]
    shard = g.input(torch.randn(E, H, H))
    total: Node | None = None
    for id in (ids[0], ids[0], ids[1]):
        here = g.call(torch.ops.hecate.gather_experts, g.call(replicate, shard, id), E, g.layer)
        total = here if total is None else g.call(operator.add, total, here)
    assert total is not None
    gm = g.finish(total)
    assert apply(share_gathers, g, gm).rewritten == 1
    assert targets(gm).count("gather_experts") == targets(gm).count("replicate") == 2


def test_other_shards_stay_apart(g: GraphUnderTest) -> None:
    leaves_alone(share_gathers, g, g.finish(g.call(operator.add, g.experts(H), g.experts(H))))


def test_no_gather_is_shared_between_grad_modes(g: GraphUnderTest) -> None:
    shard = g.input(torch.randn(E, H))
    g.call(torch._C._set_grad_enabled, False)
    first = g.call(torch.ops.hecate.gather_experts, shard, E, g.layer)
    g.call(torch._C._set_grad_enabled, True)
    second = g.call(torch.ops.hecate.gather_experts, shard, E, g.layer)
    leaves_alone(share_gathers, g, g.finish(g.call(operator.add, first, second)))
