from __future__ import annotations

import operator

import torch

from hecate.passes.captured.share_gathers import share_gathers
from tests.support.graphs import E, GraphUnderTest, H, apply, targets


def test_second_read_becomes_the_first() -> None:
    g = GraphUnderTest()
    shard = g.input(torch.randn(E, H))
    first, second = (g.call(torch.ops.hecate.gather_experts, shard, E, g.layer) for _ in range(2))
    gm = g.finish(g.call(operator.add, first, second))
    assert apply(share_gathers, g, gm).rewritten == 1
    assert targets(gm).count("gather_experts") == 1


def test_equal_casts_are_shared_and_others_are_not() -> None:
    g = GraphUnderTest()
    shard = g.input(torch.randn(E, H))
    reads = [
        g.call(torch.ops.hecate.gather_experts, g.method("to", shard, dtype), E, g.layer)
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)
    ]
    gm = g.finish(g.call(operator.add, g.call(operator.add, reads[0], reads[1]), reads[2]))
    assert apply(share_gathers, g, gm).rewritten == 1
    assert targets(gm).count("to") == 2


def test_other_shards_stay_apart() -> None:
    g = GraphUnderTest()
    gm = g.finish(g.call(operator.add, g.experts(H), g.experts(H)))
    assert apply(share_gathers, g, gm).rewritten == 0
    assert targets(gm).count("gather_experts") == 2


def test_not_between_grad_modes() -> None:
    g = GraphUnderTest()
    shard = g.input(torch.randn(E, H))
    g.call(torch._C._set_grad_enabled, False)
    first = g.call(torch.ops.hecate.gather_experts, shard, E, g.layer)
    g.call(torch._C._set_grad_enabled, True)
    second = g.call(torch.ops.hecate.gather_experts, shard, E, g.layer)
    gm = g.finish(g.call(operator.add, first, second))
    assert apply(share_gathers, g, gm).rewritten == 0
