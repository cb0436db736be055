from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes import PassContext
from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.flatten_batches import flatten_batches
from tests.support.graphs import E, GraphUnderTest, H, I, apply, leaves_alone, targets

C = 3
Between = Callable[[GraphUnderTest, Node], Node]


def rows(g: GraphUnderTest, *shape: int) -> Node:
    """Not an input of that shape: an input with E in front is a shard to the test."""
    return g.method("view", g.input(torch.randn(torch.Size(shape).numel())), *shape)


def batched(
    g: GraphUnderTest,
    *,
    product: Any = torch.bmm,
    between: Between | None = None,
    transposed: bool = False,
    bias: bool = True,
    shared: bool = False,
) -> GraphModule:
    """Two products over ``[E, C, H]``."""
    x = rows(g, 1 if shared else E, C, H)
    w_in, w_out = g.experts(I, H) if transposed else g.experts(H, I), g.experts(I, H)
    first = g.method("transpose", w_in, 1, 2) if transposed else w_in
    h = g.call(product, x, first)
    h = between(g, h) if between is not None else g.call(torch.nn.functional.silu, h)
    y = g.call(product, h, w_out)
    if bias:
        y = g.call(operator.add, y, g.call(operator.getitem, g.experts(H), (slice(None), None)))
    return g.finish(g.call(torch.sum, y, 0))


def gated(g: GraphUnderTest, h: Node) -> Node:
    """Along the last dimension, by its number and from the end."""
    parts = g.call(torch.chunk, g.call(torch.cat, [h, h], dim=2), 2, dim=-1)
    gate, up = (g.call(operator.getitem, parts, index) for index in range(2))
    return g.call(operator.mul, g.call(torch.softmax, gate, 2), g.call(operator.getitem, up, (..., slice(None))))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"product": torch.matmul},
        {"product": operator.matmul, "shared": True},
        {"transposed": True},
        {"bias": False},
        {"between": gated},
    ],
)
def test_rewrites_and_then_exchanges(options: dict[str, Any], g: GraphUnderTest) -> None:
    gm = batched(g, **options)
    assert apply(flatten_batches, g, gm).rewritten == 1
    names = targets(gm)
    assert names.count("grouped_mm.default") == 2 and not {"bmm", "matmul"} & {*names}
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def test_a_bias_that_is_read_before_slots_are_calibrated(g: GraphUnderTest) -> None:
    """What calibrate adds is known after the counts, and the view of a bias stands before them."""
    gm = batched(g)
    apply(flatten_batches, g, gm)
    context = PassContext(world_size=2, replicates=True, calibrates=True)
    assert exchange_rows(gm, context).rewritten == 1
    gm.graph.lint()


def einsum(g: GraphUnderTest, first: str, second: str, shape: tuple[int, ...]) -> GraphModule:
    h = g.call(torch.nn.functional.silu, g.call(torch.einsum, first, rows(g, *shape), g.experts(H, I)))
    w_out = g.experts(H, I) if "ehf" in second else g.experts(I, H)
    args = (w_out, h) if second.startswith(("efh", "ehf")) else (h, w_out)
    return g.finish(g.call(torch.einsum, second, *args))


@pytest.mark.parametrize(
    "first, second, shape",
    [
        ("ech,ehf->ecf", "ecf,efh->ech", (E, C, H)),
        ("th,ehf->etf", "etf,efh->eth", (C, H)),
        ("th,ehf->etf", "ehf,etf->the", (C, H)),
        ("hce,ehf->ecf", "efh,ecf->ech", (H, C, E)),
        ("...ch,...hf->...cf", "...cf,...fh->...ch", (E, C, H)),
        ("...h,ehf->e...f", "ecf,efh->ech", (C, H)),
    ],
)
def test_rewrites_einsum(first: str, second: str, shape: tuple[int, ...], g: GraphUnderTest) -> None:
    gm = einsum(g, first, second, shape)
    outcome = apply(flatten_batches, g, gm)
    assert (outcome.rewritten, outcome.skipped) == (1, ())
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def test_leaves_einsum_with_groups(g: GraphUnderTest) -> None:
    """[E, B, C, f] between the products has a dimension more than rows have."""
    groups = einsum(g, "ebch,ehf->ebcf", "ebcf,efh->ebch", (E, 2, C, H))
    outcome = apply(flatten_batches, g, groups)
    assert outcome.rewritten == 0 and outcome.skipped


REFUSED: dict[str, Between] = {
    "over rows": lambda g, h: g.call(torch.softmax, h, 1),
    "over experts": lambda g, h: g.call(operator.sub, h, g.method("mean", h, 0, True)),
    "first row": lambda g, h: g.call(operator.mul, h, g.call(operator.getitem, h, (slice(None), slice(0, 1)))),
    "weighted by own tokens": lambda g, h: g.call(operator.mul, h, g.input(torch.rand(E, C, 1))),
    "sizes baked in": lambda g, h: g.method("view", g.method("view", h, E * C, I), E, C, I),
    "changed in place": lambda g, h: g.method("mul_", h, 2.0),
}


@pytest.mark.parametrize("between", REFUSED.values(), ids=REFUSED)
def test_refuses(between: Between, g: GraphUnderTest) -> None:
    outcome = leaves_alone(flatten_batches, g, batched(g, between=between))
    assert "batched products" in outcome.skipped[0].reason


def test_a_part_of_the_experts_stays(g: GraphUnderTest) -> None:
    some = g.call(operator.getitem, g.experts(H, I), slice(None, 2))
    leaves_alone(flatten_batches, g, g.finish(g.call(torch.matmul, rows(g, 2, C, H), some)))


def test_leaves_other_products_alone(g: GraphUnderTest) -> None:
    rows, _, offsets = g.routing()
    y = g.call(torch.ops.hecate.grouped_mm.default, rows, g.experts(H, I), offsets)
    other = g.call(torch.bmm, g.input(torch.randn(E, C, I)), g.input(torch.randn(E, I, H)))
    assert leaves_alone(flatten_batches, g, g.finish(y, other)).skipped == ()
