"""Bytes that are alive: by hand on small graphs, and on real ones as far as rows and replicas decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from hecate.simulator import Capture, ClusterSpec, LiveBytes, StepMemory
from hecate.simulator.live_bytes import _Walk
from tests.hecate_compile.simulator.test_step import ByHand, captured, routed

SPEC = ClusterSpec(name="test", nodes=1, gpus=4, flops=1e9, memory_bytes=1e9, rank_bytes=1e9, node_bytes=1e9)
aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def bytes_over_time(walk: _Walk) -> list[int]:
    alive = [0] * (walk.position + 2)
    for storage in walk.storages:
        for position in range(storage.born, storage.last + 1):
            alive[position] += int(storage.size)
    return alive


def test_memory_lives_from_its_operator_to_the_last_user_of_any_view() -> None:
    def function(x: torch.Tensor) -> Sequence[torch.Tensor]:
        first = aten.exp(x)  # 400 bytes, until the view's user
        half = aten.slice(aten.view(first, [100]), 0, 0, 50)
        second = aten.sin(half)  # 200
        return [aten.sum(second)]  # 4

    step = _Walk({})
    step.forward(graph_of(function, torch.zeros(10, 10)), saves=0)
    # Input, exp, two views, sin, sum, output. While an operator runs, its inputs are alive.
    assert bytes_over_time(step)[1:8] == [0, 400, 400, 400, 600, 204, 4]


def test_what_is_saved_lives_until_its_last_user_in_the_backward_and_gradients_stay() -> None:
    def forward(x: torch.Tensor) -> Sequence[torch.Tensor]:
        saved = aten.exp(x)
        other = aten.sin(x)
        return [aten.sum(aten.mul(saved, other)), aten.view(saved, [-1])]

    graph = graph_of(forward, torch.zeros(100))
    back = Graph()
    saved, tangent = back.placeholder("view"), back.placeholder("tangents_1")
    product = back.call_function(aten.mul.Tensor, (saved, tangent))
    again = back.call_function(aten.neg.default, (product,))
    back.output((None, again))
    for node, shape in ((saved, 100), (tangent, ()), (product, 100), (again, 100)):
        node.meta["val"] = torch.empty(shape)
    step = _Walk({})
    step.forward(graph, saves=1)
    step.backward(back)
    # exp, sin, their product, sum, view, output; in between; saved, tangent, product, negation, output; afterwards.
    expected = [400, 800, 1200, 804, 404, 404, 404, 404, 404, 804, 800, 400, 400, 0]
    assert bytes_over_time(step)[2:] == expected
    assert [storage.kind for storage in step.storages if storage.last == step.position] == ["gradients"]


@pytest.fixture(scope="module")
def made() -> Capture:
    return captured(64, spec=SPEC, replicas=2)


def held(made: Capture, workload: str) -> tuple[StepMemory, np.ndarray]:
    step = routed(made, workload, SPEC)
    return LiveBytes(made).step(step, optimizer_bytes=8), sum(layer.rows.sum(0) for layer in step)


def test_ranks_with_more_rows_hold_more(made: Capture) -> None:
    even, rows = held(made, "balanced")
    assert len(set(rows)) == 1 and len(set(even.peak)) == 1
    skewed, rows = held(made, "zipf")
    assert np.argmax(skewed.most_activations) == np.argmax(rows)
    assert skewed.most_activations.max() > even.most_activations.max() > skewed.most_activations.min()
    for found in (even, skewed):
        parts = found.states + found.gradients + found.gathered + found.activations
        assert found.peak == pytest.approx(parts) and (found.activations <= found.most_activations).all()


def test_states_are_parameters_and_two_moments(made: Capture) -> None:
    found, _ = held(made, "balanced")
    own = made.layers[0].num_experts // 4 * made.layers[0].sizes.expert_bytes * len(made.layers)
    assert found.states == pytest.approx(3 * (made.dense_bytes + own))


def test_replicas_are_held_where_they_are(made: Capture) -> None:
    hand, rows = ByHand(made), np.full((4, 4), made.rows // 4)
    steps = [hand.step(hand.placement(replicas), rows) for replicas in ((), (3,))]
    none, one = (LiveBytes(made).step([step] * len(made.layers), optimizer_bytes=8) for step in steps)
    assert not none.gathered.any()
    # Both layers' replicas are there from the forward to the backward.
    assert one.gathered.tolist() == [0, 0, 0, len(made.layers) * made.layers[0].sizes.expert_bytes]
    more = one.peak - none.peak
    assert more[3] >= one.gathered[3] and not more[1:3].any()
