"""Steps that can be worked out by hand, and real compiled graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hecate
from hecate.passes.final.node_cost import flops
from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.policy import Static
from hecate.simulator import Capture, ClusterSpec, LayerStep, Simulator, capture, walk
from hecate.simulator.capture import CaptureError
from hecate.simulator.memory import count_memory
from hecate.simulator.program import Compute, Start, Wait, program_of
from hecate.simulator.step import _serve
from hecate.simulator.workloads import make
from tests.support.extent import ALL
from tests.support.models import build

SPEC = ClusterSpec(
    name="test", nodes=2, gpus=2, flops=1e9, memory_bytes=1e15, rank_bytes=1e6, node_bytes=1e5, latency=0.0
)
ROWS = np.asarray([[5, 1, 2, 0], [0, 6, 1, 1], [0, 0, 4, 4], [8, 0, 0, 0]])


@pytest.fixture(scope="module")
def made() -> Capture:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    model = build("qwen3_moe")
    return capture(model, {"input_ids": ids, "labels": ids}, SPEC, hecate.Config(replicas=1))


def test_a_tokens_rows_cross_to_a_node_together(made: Capture) -> None:
    """Counts do not say which rows are of one token, so they are taken to go where they go independently."""
    ids = torch.zeros(2, 16, dtype=torch.int64)
    config = hecate.Config(replicas=1, dispatch="nodes")
    by_node = capture(build("qwen3_moe"), {"input_ids": ids, "labels": ids}, SPEC, config)
    assert (by_node.rows, by_node.row_bytes) == (made.rows, made.row_bytes)
    step = layer_step(by_node, owned(by_node))
    spans = Simulator(by_node, SPEC).step([step, step]).spans
    assert [span.operator for span in spans].count("route_nodes") == 2
    assert [span.operator for span in spans].count("exchange_nodes_back") == 4
    # Ranks 0 and 1 have 4 tokens of 2 rows each, of which a quarter goes to the other node: 1 - 0.75 ** 2 of 4 tokens
    # cross. All 4 of rank 3 do, to rank 1 as their relay, which passes 8 rows on to rank 0.
    slow_inside = replace(SPEC, rank_bytes=1e2, node_bytes=1e12)
    for operator in ("exchange_nodes", "exchange_nodes_back"):
        items = [Start(token=0, operator=operator, layer=by_node.layers[0].id, unit=100.0), Wait(0)]
        assert by_hand(by_node, items, SPEC, step) == pytest.approx(4 * 100 / 1e5 + 8 * 100 / 1e6)
        assert by_hand(by_node, items, slow_inside, step) == pytest.approx(8 * 100 / 1e2)


@pytest.mark.skipif(not ALL, reason="compiles twice, and the formula has tests of its own: with HECATE_TESTS=all")
def test_sparse_attention_is_charged_for_its_blocks() -> None:
    """Not for what dense attention would do: transfers have less to hide behind."""
    length, heads = 128, 4
    ids = torch.zeros(2, length, dtype=torch.int64)
    options = hecate.S2Attention(block=16, local=1, dense_layers=(0,))

    def operations(attention: hecate.S2Attention | None) -> list[float]:
        model = build("qwen3_moe", max_position_embeddings=length)
        config = hecate.Config(replicas=1, attention=attention)
        made = capture(model, {"input_ids": ids, "labels": ids}, SPEC, config)
        return [
            float(flops(node))
            for captured in made.graphs
            for node in captured.graph.graph.nodes
            if "attention" in str(node.target) and flops(node)
        ]

    # Forward of two layers, then backward, the last layer first.
    (first, second, third, fourth), dense = operations(options), operations(None)
    assert dense == [first, first, fourth, fourth]
    # Dense attention counts the half above the diagonal, too.
    n = length // 16
    share = options.pattern(heads, 2).share(length) * (n + 1) / (2 * n)
    assert second == pytest.approx(first * share) and third == pytest.approx(fourth * share)


def layer_step(made: Capture, placement: Placement, rows: np.ndarray = ROWS) -> LayerStep:
    computed = np.zeros((made.layers[0].num_experts, 4), dtype=np.int64)
    computed[0] = rows.sum(0)
    return LayerStep(planned=placement, placement=placement, rows=rows, computed=computed, moved=0)


def by_hand(made: Capture, items: list[Any], spec: ClusterSpec, step: LayerStep) -> float:
    """Seconds of a program that is made by hand and not from a graph."""
    simulator = Simulator(made, spec)
    simulator.parts = [("forward", items)]
    simulator.layers = [made.layers[0].id]
    return simulator.step([step]).seconds


def owned(made: Capture) -> Placement:
    return Placement.owned(Owners.contiguous(made.layers[0].num_experts, 4))


def test_an_exchange_takes_the_busiest_link(made: Capture) -> None:
    id = made.layers[0].id
    start = Start(token=0, operator="exchange", layer=id, unit=100.0)
    # Between nodes: node 0 sends 4 rows, node 1 sends 8; inside, rank 2 sends 4 and rank 0 one.
    assert by_hand(made, [start, Wait(0)], SPEC, layer_step(made, owned(made))) == pytest.approx(8 * 100 / 1e5)
    fast = replace(SPEC, node_bytes=1e12)
    assert by_hand(made, [start, Wait(0)], fast, layer_step(made, owned(made))) == pytest.approx(4 * 100 / 1e6)
    crowded = replace(SPEC, crowded=0.5)
    assert by_hand(made, [start, Wait(0)], crowded, layer_step(made, owned(made))) == pytest.approx(16 * 100 / 1e5)
    back = replace(start, operator="exchange_back")
    assert by_hand(made, [back, Wait(0)], crowded, layer_step(made, owned(made))) == pytest.approx(16 * 100 / 1e5)
    late = replace(SPEC, latency=3.0)
    assert by_hand(made, [start, Wait(0)], late, layer_step(made, owned(made))) == pytest.approx(3.008)


def test_compute_hides_what_travels_meanwhile(made: Capture) -> None:
    id = made.layers[0].id
    start = Start(token=0, operator="exchange", layer=id, unit=1e5)  # 8 seconds
    for seconds, expected in ((3.0, 8.0), (11.0, 11.0)):
        compute = Compute(operators=1, fixed=((seconds * 1e9, 0.0),), routed=())
        step = layer_step(made, owned(made))
        assert by_hand(made, [start, compute, Wait(0)], SPEC, step) == pytest.approx(expected)
        assert by_hand(made, [start, Wait(0), compute], SPEC, step) == pytest.approx(8 + seconds)


def test_collectives_wait_for_the_busiest_rank_and_for_each_other(made: Capture) -> None:
    id = made.layers[0].id
    first, second = (Start(token=t, operator="exchange", layer=id, unit=1e5) for t in (0, 1))
    busy = Compute(operators=1, fixed=(), routed=(lambda sizes: (sizes[id, "rows"] * 1e9, sizes[id, "rows"] * 0),))
    # The busiest rank computes 13 rows for 13 s; then two exchanges of 8 s, one after the other.
    step = layer_step(made, owned(made))
    assert by_hand(made, [busy, first, second, Wait(0), Wait(1)], SPEC, step) == pytest.approx(13 + 16)


def test_experts_travel_to_their_replicas_and_gradients_back(made: Capture) -> None:
    id = made.layers[0].id
    placement = Placement.with_replicas(
        owned(made).owners, [{3}, *[set() for _ in range(made.layers[0].num_experts - 1)]]
    )
    step = layer_step(made, placement)
    for operator in ("sparse_all_gather", "sparse_reduce_scatter"):
        start = Start(token=0, operator=operator, layer=id, unit=1e5)
        # One expert crosses from rank 0's node to rank 3's; only exchanges crowd a link.
        for spec in (SPEC, replace(SPEC, crowded=0.5)):
            assert by_hand(made, [start, Wait(0)], spec, step) == pytest.approx(1.0)
        assert by_hand(made, [start, Wait(0)], SPEC, layer_step(made, owned(made))) == pytest.approx(0, abs=1e-6)


def test_a_collective_is_nothing_for_ranks_that_neither_send_nor_receive(made: Capture) -> None:
    spec, id = replace(SPEC, latency=3.0, start=2.0), made.layers[0].id
    # Rank 3 has a replica of an expert of rank 0.
    replicated = Placement.with_replicas(
        owned(made).owners, [{3}, *[set() for _ in range(made.layers[0].num_experts - 1)]]
    )
    simulator = Simulator(made, spec)
    simulator.layers = [id]
    for operator in ("sparse_all_gather", "sparse_reduce_scatter"):
        start = Start(token=0, operator=operator, layer=id, unit=1e5)
        simulator.parts = [("forward", [start, Wait(0)])]
        found = simulator.step([layer_step(made, replicated)])
        assert found.compute == pytest.approx([2, 0, 0, 2], abs=1e-6)
        assert found.waited == pytest.approx([4, 0, 0, 4], abs=1e-6)
        assert simulator.step([layer_step(made, owned(made))]).seconds == pytest.approx(0, abs=1e-6)
    # Rows to itself do not count either; what goes around a ring concerns all.
    alone = layer_step(made, owned(made), np.diag([1, 2, 3, 4]) + np.eye(4, k=3, dtype=np.int64))
    simulator.parts = [("forward", [Start(token=0, operator="exchange", layer=id, unit=0.0), Wait(0)])]
    assert simulator.step([alone]).waited == pytest.approx([3, 0, 0, 3])
    simulator.parts = [("forward", [Start(token=0, operator="average_gradients", layer=None, unit=0.0), Wait(0)])]
    assert simulator.step([alone]).waited == pytest.approx([3, 3, 3, 3])


def test_an_all_reduce_is_a_ring(made: Capture) -> None:
    start = Start(token=0, operator="average_gradients", layer=None, unit=1e5)
    assert by_hand(made, [start, Wait(0)], SPEC, layer_step(made, owned(made))) == pytest.approx(2 * 3 / 4)


def test_cpus_add_up_inside_nodes_before_they_cross(made: Capture) -> None:
    """Two nodes of two: each sends half of its part and half of the sum, and a ring would send it all three times."""
    start = Start(token=0, operator="average_gradients", layer=None, unit=1e5)
    spec = replace(SPEC, cpus=True, rank_bytes=1e12, ring=2.0)
    assert by_hand(made, [start, Wait(0)], spec, layer_step(made, owned(made))) == pytest.approx(1.0, rel=1e-3)
    # Counts go straight, two from each rank to the other node.
    counts = Start(token=0, operator="gather_counts", layer=None, unit=1e5)
    assert by_hand(made, [counts, Wait(0)], spec, layer_step(made, owned(made))) == pytest.approx(4.0, rel=1e-3)


def test_what_goes_from_rank_to_rank_takes_longer_to_begin(made: Capture) -> None:
    slow, step = replace(SPEC, ring=2.0, latency=1.0), layer_step(made, owned(made))
    id = made.layers[0].id
    for operator, layer, expected in (
        # Once around to sum, once to share.
        ("average_gradients", None, 5.0),
        ("gather_dense", None, 3.0),
        ("gather_counts", None, 3.0),
        ("gather_experts", id, 3.0),
        ("reduce_scatter_dense", None, 1.0),
        ("exchange", id, 1.0),
    ):
        start = Start(token=0, operator=operator, layer=layer, unit=0.0)
        assert by_hand(made, [start, Wait(0)], slow, step) == pytest.approx(expected), operator


def test_what_all_ranks_gather_and_scatter(made: Capture) -> None:
    """Around a ring one rank sends out of each node; straight, two ranks send to two."""
    id, experts = made.layers[0].id, made.layers[0].num_experts
    uneven = Owners((*[0] * (experts - 3), 1, 2, 3), 4)
    for operator, layer, units in (
        ("gather_dense", None, 3.0),
        ("reduce_scatter_dense", None, 2 * 2 / 4),
        ("gather_experts", id, 3.0 * (experts - 3)),
        # Into the first node: both other ranks send it the gradients of what it owns.
        ("reduce_scatter_experts", id, 2.0 * (experts - 2)),
    ):
        start = Start(token=0, operator=operator, layer=layer, unit=1e5)
        step = layer_step(made, Placement.owned(uneven))
        assert by_hand(made, [start, Wait(0)], SPEC, step) == pytest.approx(units), operator


def test_a_captured_model_has_its_collectives_in_the_order_of_training(made: Capture) -> None:
    symbols: dict[Any, Any] = {}
    forward, backward = (program_of(graph, symbols) for graph in made.graphs)
    names = [item.operator for item in forward if isinstance(item, Start)]
    layers = len(made.layers)
    assert names.count("exchange") == names.count("exchange_back") == layers
    assert names.count("sparse_all_gather") == layers
    back = [item.operator for item in backward if isinstance(item, Start)]
    assert back.count("exchange") == back.count("exchange_back") == layers
    assert back.count("sparse_reduce_scatter") == layers
    for program in (forward, backward):
        started = [item.token for item in program if isinstance(item, Start)]
        assert sorted(item.token for item in program if isinstance(item, Wait)) == started
    assert {meaning.what for meaning in symbols.values()} >= {"rows", "replicas"}


def test_more_rows_take_longer_and_even_rows_are_fastest(made: Capture) -> None:
    slow = replace(SPEC, flops=1e6)
    simulator = Simulator(made, slow)
    experts, layers = made.layers[0].num_experts, len(made.layers)
    found = {}
    for name in ("balanced", "zipf", "one_hot"):
        counts = make(name, steps=1, layers=layers, ranks=4, experts=experts, rows=made.rows)
        ((_, routed),) = walk(
            Static(),
            counts,
            [layer.owners for layer in made.layers],
            topology=slow.topology,
            rates=slow.rates,
            sizes=made.sizes,
        )
        prediction = simulator.step(routed)
        assert (prediction.waited >= -1e-9).all()
        assert prediction.seconds >= prediction.compute.max()
        found[name] = prediction.seconds
    assert found["balanced"] < found["zipf"] < found["one_hot"]


def test_plans_know_that_rematerialized_experts_come_twice(made: Capture) -> None:
    model, ids = build("qwen3_moe"), torch.zeros(2, 16, dtype=torch.int64)
    config = hecate.Config(replicas=1, rematerialize=True)
    again = capture(model, {"input_ids": ids, "labels": ids}, SPEC, config)
    assert {layer.sizes.expert_transfers for layer in made.layers} == {2}
    assert {layer.sizes.expert_transfers for layer in again.layers} == {3}


def test_memory_counts_states_and_replicas(made: Capture) -> None:
    layer = made.layers[0]
    step = [layer_step(made, owned(made)) for _ in made.layers]
    plain = count_memory(made, step, optimizer_bytes=8)
    dense = sum(count * (2 * size + 8) for count, size in made.dense)
    mine = layer.num_experts // 4
    assert plain.states == dense + len(made.layers) * mine * layer.sizes.expert_bytes * 4
    # Gradients of one layer's experts on their way.
    assert plain.slots == mine * layer.sizes.expert_bytes
    placement = Placement.with_replicas(owned(made).owners, [{3}, *[set() for _ in range(layer.num_experts - 1)]])
    more = count_memory(made, [layer_step(made, placement) for _ in made.layers], optimizer_bytes=8)
    # Rank 3 holds a replica in every layer, and gradients of one layer's own experts and replica.
    assert more.slots == (len(made.layers) + mine + 1) * layer.sizes.expert_bytes
    few = count_memory(made, [layer_step(made, placement)] * len(made.layers), optimizer_bytes=8, rematerialize=True)
    assert few.slots == (min(2, len(made.layers)) + mine + 1) * layer.sizes.expert_bytes


def test_a_policy_sees_earlier_steps_only(made: Capture) -> None:
    experts = made.layers[0].num_experts
    counts = make("one_hot", steps=3, layers=1, ranks=4, experts=experts, rows=1000)
    rates = replace(SPEC.rates, hidden_seconds=1e9)
    policy = Hecate(objective="paper", replicas=1)
    steps = list(
        walk(
            policy, counts, [Owners.contiguous(experts, 4)], topology=SPEC.topology, rates=rates, sizes=made.sizes[:1]
        )
    )
    assert steps[0][1][0].placement.num_replicas == 0
    assert steps[1][1][0].placement.num_replicas > 0
    for number, (layer,) in steps:
        assert layer.rows.sum() == counts[number].sum() == layer.computed.sum()


def test_links_serve_first_who_is_ready_first() -> None:
    places = np.asarray([0, 0, 1, 0])
    ready = np.asarray([5.0, 0.0, 2.0, 1.0])
    seconds = np.asarray([1.0, 3.0, 4.0, 1.0])
    # Place 0: 0-3, 3-4, idle, 5-6. Place 1: 2-6.
    assert _serve(places, ready, seconds).tolist() == [6.0, 3.0, 6.0, 4.0]


def test_ranks_that_are_early_exchange_before_the_last_comes(made: Capture) -> None:
    id = made.layers[0].id
    start = Start(token=0, operator="exchange", layer=id, unit=1e5)
    late = Compute(operators=1, fixed=(), routed=(lambda sizes: (np.asarray([20e9, 0, 0, 0]), np.zeros(4)),))
    # Rank 3's 8 rows go to rank 0, which is 20 s late; rank 1's two rows to the other node are through by then.
    assert by_hand(made, [late, start, Wait(0)], SPEC, layer_step(made, owned(made))) == pytest.approx(28.0)
    without = ROWS.copy()
    without[3, 0] = 0
    assert by_hand(made, [late, start, Wait(0)], SPEC, layer_step(made, owned(made), without)) == pytest.approx(22.0)


def test_gradients_are_added_up_inside_nodes_before_they_cross(made: Capture) -> None:
    id, owners = made.layers[0].id, owned(made).owners
    both = Placement.with_replicas(owners, [{2, 3}, *[set() for _ in range(made.layers[0].num_experts - 1)]])
    slow_inside = replace(SPEC, rank_bytes=5e4)
    simulator = Simulator(made, slow_inside)
    simulator.layers = [id]
    late = Compute(operators=1, fixed=(), routed=(lambda sizes: (np.asarray([0, 0, 0, 7e9]), np.zeros(4)),))
    step = layer_step(made, both)
    # Out: one second to rank 2, and two from there to rank 3, which is late and so waits for nobody's first stage.
    # Back: rank 3 comes after 7 s; two seconds to rank 2, then one to rank 0.
    for operator, expected in (("sparse_all_gather", 9.0), ("sparse_reduce_scatter", 10.0)):
        start = Start(token=0, operator=operator, layer=id, unit=1e5)
        assert by_hand(made, [late, start, Wait(0)], slow_inside, step) == pytest.approx(expected), operator


def test_what_is_added_after_the_gate_never_travels_twice(made: Capture) -> None:
    """With a lower rank added, another rank receives the expert for its node; who had it already gets nothing."""
    id, owners = made.layers[0].id, owned(made).owners
    none = [set() for _ in range(made.layers[0].num_experts - 1)]
    planned, placed = (Placement.with_replicas(owners, [ranks, *none]) for ranks in ({3}, {2, 3}))
    step = replace(layer_step(made, placed), planned=planned)
    start = Start(token=0, operator="top_up", layer=id, unit=1e5)
    assert by_hand(made, [start, Wait(0)], SPEC, step) == pytest.approx(1.0)


def test_a_busy_link_delays_the_next_collective(made: Capture) -> None:
    id = made.layers[0].id
    rows = np.zeros((4, 4), dtype=np.int64)
    rows[0, 2] = rows[1, 3] = 5
    first, second = (Start(token=t, operator="exchange", layer=id, unit=1e5) for t in (0, 1))
    # 10 rows out of node 0 take 10 s. Ranks 0 and 2 are done after 5, but their second exchange waits for the link.
    assert by_hand(
        made, [first, second, Wait(0), Wait(1)], SPEC, layer_step(made, owned(made), rows)
    ) == pytest.approx(20)


def test_models_that_cannot_be_simulated_are_refused() -> None:
    class Broken(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: torch.Tensor) -> object:
            out = self.inner(**inputs)
            torch._dynamo.graph_break()
            return out

    ids = torch.zeros(2, 16, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    with pytest.raises(CaptureError, match="graph break"):
        capture(Broken(build("qwen3_moe", layers=1)), inputs, SPEC, hecate.Config())
    with pytest.raises(CaptureError, match="exchanges no tokens"):
        capture(build("qwen3_moe", layers=1), inputs, SPEC, hecate.Config(policy="gather"))
    with pytest.raises(CaptureError, match="it is not simulated"):
        capture(build("qwen3_moe", layers=1), inputs, SPEC, hecate.Config(transport="symmetric"))
