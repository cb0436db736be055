from __future__ import annotations

import operator
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from hecate.passes.captured.bucket_gradients import bucket_gradients
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.ops.gradients import GradientSync, add_replicated, replicate, replicate_bucket
from tests.support.graphs import GraphUnderTest, apply, leaves_alone, number_of, targets

MODULE = torch.nn.Linear(3, 1, bias=False)


def read(g: GraphUnderTest, placeholder: Node) -> Node:
    return g.call(replicate, placeholder, number_of(add_replicated(MODULE, "weight", GradientSync(SINGLE))))


def test_reads_share_a_bucket_and_tied_reads_one_place(g: GraphUnderTest) -> None:
    a, b = g.input(torch.randn(3)), g.input(torch.randn(3))
    total = g.call(operator.add, read(g, a), read(g, b))
    gm = g.finish(g.call(operator.add, total, read(g, a)))
    assert apply(bucket_gradients, g, gm).rewritten == 1
    assert targets(gm).count("replicate_bucket") == 1
    assert "replicate" not in targets(gm)
    assert targets(gm).count("getitem") == 2


def test_dtypes_and_sizes_split_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    # By way of sys.modules: the package exports the function under the name of its module.
    monkeypatch.setattr(sys.modules[bucket_gradients.__module__], "BUCKET_BYTES", 24)
    g = GraphUnderTest()
    values = [torch.randn(3), torch.randn(3), torch.randn(3), torch.randn(3).bfloat16()]
    inputs = [g.input(value) for value in values]
    reads = [read(g, placeholder) for placeholder in inputs]
    total = reads[0]
    for other in reads[1:]:
        total = g.call(operator.add, total, other)
    gm = g.finish(total)
    assert apply(bucket_gradients, g, gm).rewritten == 3


def test_experts_of_a_layer_are_a_bucket_and_other_ranks_have_others() -> None:
    g, two = GraphUnderTest(), replace(SINGLE, numbers=(0, 2))
    kinds: list[dict[str, Any]] = [
        {"sync": GradientSync(SINGLE)},
        {"sync": GradientSync(two), "layer": 1},
        {"sync": GradientSync(two), "layer": 1},
        {"sync": GradientSync(two), "layer": 2},
        {"sync": GradientSync(two)},
    ]
    total = g.input(torch.randn(3))
    for kind in kinds:
        id = number_of(add_replicated(MODULE, "weight", **kind))
        total = g.call(operator.add, total, g.call(replicate, g.input(torch.randn(3)), id))
    gm = g.finish(total)
    assert apply(bucket_gradients, g, gm).rewritten == 4
    sizes = [len(node.args[0]) for node in gm.graph.nodes if node.target is replicate_bucket]
    assert sorted(sizes) == [1, 1, 1, 2]


def test_unused_and_no_grad_reads_are_left_alone(g: GraphUnderTest) -> None:
    a, b = g.input(torch.randn(3)), g.input(torch.randn(3))
    read(g, a)
    g.call(torch._C._set_grad_enabled, False)
    quiet = read(g, b)
    g.call(torch._C._set_grad_enabled, True)
    leaves_alone(bucket_gradients, g, g.finish(g.method("clone", quiet)))


def test_what_the_graph_changes_in_place_stays_as_it_is(g: GraphUnderTest) -> None:
    a, b, c = (g.input(torch.randn(3)) for _ in range(3))
    before = read(g, c)
    g.call(torch._C._set_grad_enabled, False)
    g.method("mul_", b, 1)
    g.call(torch._C._set_grad_enabled, True)
    gm = g.finish(g.call(operator.add, g.call(operator.add, read(g, a), read(g, b)), before))
    assert apply(bucket_gradients, g, gm).rewritten == 1
    assert targets(gm).count("replicate") == 1 and targets(gm).count("replicate_bucket") == 1
