"""What a node costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hecate.passes.final.node_cost import flops, is_heavy

aten = torch.ops.aten
FORWARD = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
)
BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
QUERY, KEY, VALUE, GRAD = (2, 8, 33, 16), (2, 2, 47, 16), (2, 2, 47, 24), (2, 8, 33, 24)


def _call(packet: Any, *shapes: tuple[int, ...]) -> torch.fx.Node:
    """A call whose operands have these shapes; attention reads no others."""
    graph = Graph()
    given = []
    for number, shape in enumerate(shapes):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = torch.empty(shape, device="meta")
        given.append(node)
    return graph.call_function(packet.default, tuple(given))


def _with_heads(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], QUERY[1], *shape[2:])


@pytest.mark.parametrize("packet", FORWARD, ids=str)
def test_heads_that_share_keys_count_as_if_each_had_its_own(packet: Any) -> None:
    node = _call(packet, QUERY, KEY, VALUE)
    assert is_heavy(node)
    assert flops(node) == sdpa_flop_count(QUERY, _with_heads(KEY), _with_heads(VALUE))


@pytest.mark.parametrize("packet", BACKWARD, ids=str)
def test_their_backward_too(packet: Any) -> None:
    node = _call(packet, GRAD, QUERY, KEY, VALUE)
    assert is_heavy(node)
    assert flops(node) == sdpa_backward_flop_count(GRAD, QUERY, _with_heads(KEY), _with_heads(VALUE))


def test_formulas_of_torch_that_refuse_shared_keys_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.13."""

    def refuse(*shapes: Any, **options: Any) -> int:
        raise AssertionError("heads differ")

    for packet in (*FORWARD, *BACKWARD):
        monkeypatch.setitem(flop_registry, packet, refuse)
    assert flops(_call(FORWARD[0], QUERY, KEY, VALUE)) > 0
    assert flops(_call(BACKWARD[0], GRAD, QUERY, KEY, VALUE)) > 0
