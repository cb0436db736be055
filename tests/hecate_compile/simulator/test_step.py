"""Steps that can be worked out by hand, and real compiled graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hecate
from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.policy import Static
from hecate.simulator import Capture, ClusterSpec, LayerStep, Simulator, capture, walk
from hecate.simulator.capture import CaptureError
from hecate.simulator.live_bytes import count_memory
from hecate.simulator.program import Compute, Start, Wait, program_of
from hecate.simulator.step import Prediction, _serve
from hecate.simulator.workloads import make
from tests.support.models import build

SPEC = ClusterSpec(
    name="test", nodes=2, gpus=2, flops=1e9, memory_bytes=1e15, rank_bytes=1e6, node_bytes=1e5, latency=0.0
)
ROWS = np.asarray([[5, 1, 2, 0], [0, 6, 1, 1], [0, 0, 4, 4], [8, 0, 0, 0]])


def captured(length: int = 16, *, layers: int = 2, spec: ClusterSpec = SPEC, **options: Any) -> Capture:
    ids = torch.zeros(2, length, dtype=torch.int64)
    config = hecate.Config(**{"replicas": 1} | options)
    return capture(build("qwen3_moe", layers=layers), {"input_ids": ids, "labels": ids}, spec, config)


def routed(made: Capture, workload: str, spec: ClusterSpec) -> list[LayerStep]:
    """A step of made-up routing with experts at their owners."""
    experts, layers = made.layers[0].num_experts, len(made.layers)
    counts = make(workload, steps=1, layers=layers, ranks=4, experts=experts, rows=made.rows)
    owners = [layer.owners for layer in made.layers]
    given: dict[str, Any] = {"topology": spec.topology, "rates": spec.rates, "sizes": made.sizes}
    ((_, (found,)),) = walk(Static(), counts[None], owners, **given)
    return list(found)


class ByHand:
    """Programs that are made by hand and not from a graph, on the first layer of a captured model."""

    def __init__(self, made: Capture) -> None:
        self.made, self.id, self.experts = made, made.layers[0].id, made.layers[0].num_experts

    def placement(self, replicas: Collection[int] = ()) -> Placement:
        """Owners in order, and the first expert's replicas."""
        owners = Owners.contiguous(self.experts, 4)
        return Placement.with_replicas(owners, [set(replicas), *[set() for _ in owners.ranks[1:]]])

    def step(self, placement: Placement | None = None, rows: np.ndarray = ROWS) -> LayerStep:
        placement = self.placement() if placement is None else placement
        computed = np.zeros((self.experts, 4), dtype=np.int64)
        computed[0] = rows.sum(0)
        return LayerStep(planned=placement, placement=placement, rows=rows, computed=computed, moved=0)

    def start(self, operator: str, unit: float = 1e5, token: int = 0) -> Start:
        of_all = operator in ("average_gradients", "gather_dense", "reduce_scatter_dense", "gather_counts")
        return Start(token=token, operator=operator, layer=None if of_all else self.id, unit=unit)

    def predicted(self, items: Sequence[Any], spec: ClusterSpec = SPEC, step: LayerStep | None = None) -> Prediction:
        simulator = Simulator(self.made, spec)
        simulator.parts, simulator.layers = [("forward", list(items))], [self.id]
        return simulator.step([self.step() if step is None else step])

    def seconds(self, items: Sequence[Any], spec: ClusterSpec = SPEC, step: LayerStep | None = None) -> float:
        return self.predicted(items, spec, step).seconds

    def alone(
        self, operator: str, unit: float = 1e5, spec: ClusterSpec = SPEC, step: LayerStep | None = None
    ) -> float:
        """Seconds of one collective that is waited for at once."""
        return self.seconds([self.start(operator, unit), Wait(0)], spec, step)


@pytest.fixture(scope="module")
def made() -> Capture:
    return captured()


@pytest.fixture(scope="module")
def hand(made: Capture) -> ByHand:
    return ByHand(made)


def test_a_tokens_rows_cross_to_a_node_together(made: Capture) -> None:
    """Counts do not say which rows are of one token, so they are taken to go where they go independently."""
    by_node = captured(dispatch="nodes")
    assert (by_node.rows, by_node.row_bytes) == (made.rows, made.row_bytes)
    hand = ByHand(by_node)
    operators = [span.operator for span in Simulator(by_node, SPEC).step([hand.step(), hand.step()]).spans]
    assert operators.count("route_nodes") == 2 and operators.count("exchange_nodes_back") == 4
    # Ranks 0 and 1 have 4 tokens of 2 rows each, of which a quarter goes to the other node: 1 - 0.75 ** 2 of 4 tokens
    # cross. All 4 of rank 3 do, to rank 1 as their relay, which passes 8 rows on to rank 0.
    slow_inside = replace(SPEC, rank_bytes=1e2, node_bytes=1e12)
    for operator in ("exchange_nodes", "exchange_nodes_back"):
        assert hand.alone(operator, 100.0) == pytest.approx(4 * 100 / 1e5 + 8 * 100 / 1e6)
        assert hand.alone(operator, 100.0, slow_inside) == pytest.approx(8 * 100 / 1e2)


def test_an_exchange_takes_the_busiest_link(hand: ByHand) -> None:
    # Between nodes: node 0 sends 4 rows, node 1 sends 8; inside, rank 2 sends 4 and rank 0 one.
    assert hand.alone("exchange", 100.0) == pytest.approx(8 * 100 / 1e5)
    assert hand.alone("exchange", 100.0, replace(SPEC, node_bytes=1e12)) == pytest.approx(4 * 100 / 1e6)
    for operator in ("exchange", "exchange_back"):
        assert hand.alone(operator, 100.0, replace(SPEC, crowded=0.5)) == pytest.approx(16 * 100 / 1e5)
    assert hand.alone("exchange", 100.0, replace(SPEC, latency=3.0)) == pytest.approx(3.008)


def test_compute_hides_what_travels_meanwhile(hand: ByHand) -> None:
    start = hand.start("exchange")  # 8 seconds
    for seconds, expected in ((3.0, 8.0), (11.0, 11.0)):
        compute = Compute(operators=1, fixed=((seconds * 1e9, 0.0),), routed=())
        assert hand.seconds([start, compute, Wait(0)]) == pytest.approx(expected)
        assert hand.seconds([start, Wait(0), compute]) == pytest.approx(8 + seconds)


def test_collectives_wait_for_the_busiest_rank_and_for_each_other(hand: ByHand) -> None:
    id = hand.id
    busy = Compute(operators=1, fixed=(), routed=(lambda sizes: (sizes[id, "rows"] * 1e9, sizes[id, "rows"] * 0),))
    # The busiest rank computes 13 rows for 13 s; then two exchanges of 8 s, one after the other.
    items = [busy, hand.start("exchange"), hand.start("exchange", token=1), Wait(0), Wait(1)]
    assert hand.seconds(items) == pytest.approx(13 + 16)


def test_experts_travel_to_their_replicas_and_gradients_back(hand: ByHand) -> None:
    # One expert crosses from rank 0's node to rank 3's; only exchanges crowd a link.
    step, late = hand.step(hand.placement({3})), replace(SPEC, latency=3.0, start=2.0)
    for operator in ("sparse_all_gather", "sparse_reduce_scatter"):
        for spec in (SPEC, replace(SPEC, crowded=0.5)):
            assert hand.alone(operator, 1e5, spec, step) == pytest.approx(1.0)
        assert hand.alone(operator) == hand.alone(operator, 1e5, late) == pytest.approx(0, abs=1e-6)
        # It is nothing for ranks that neither send nor receive.
        found = hand.predicted([hand.start(operator), Wait(0)], late, step)
        assert found.compute == pytest.approx([2, 0, 0, 2], abs=1e-6)
        assert found.waited == pytest.approx([4, 0, 0, 4], abs=1e-6)
    # Rows to itself do not count either; what goes around a ring concerns all.
    alone = hand.step(rows=np.diag([1, 2, 3, 4]) + np.eye(4, k=3, dtype=np.int64))
    for operator, waited in (("exchange", [3, 0, 0, 3]), ("average_gradients", [3, 3, 3, 3])):
        assert hand.predicted([hand.start(operator, 0.0), Wait(0)], late, alone).waited == pytest.approx(waited)


def test_an_all_reduce_is_a_ring(hand: ByHand) -> None:
    """But CPUs add up inside nodes: each sends half of its part and half of the sum, a ring all of it three times."""
    assert hand.alone("average_gradients") == pytest.approx(2 * 3 / 4)
    cpus = replace(SPEC, cpus=True, rank_bytes=1e12, ring=2.0)
    assert hand.alone("average_gradients", 1e5, cpus) == pytest.approx(1.0, rel=1e-3)
    # Counts go straight, two from each rank to the other node.
    assert hand.alone("gather_counts", 1e5, cpus) == pytest.approx(4.0, rel=1e-3)


def test_what_goes_from_rank_to_rank_takes_longer_to_begin(hand: ByHand) -> None:
    slow = replace(SPEC, ring=2.0, latency=1.0)
    # Once around to sum, once to share.
    expected = {"average_gradients": 5.0, "gather_dense": 3.0, "gather_counts": 3.0, "gather_experts": 3.0}
    for operator, seconds in (expected | {"reduce_scatter_dense": 1.0, "exchange": 1.0}).items():
        assert hand.alone(operator, 0.0, slow) == pytest.approx(seconds), operator


def test_what_all_ranks_gather_and_scatter(hand: ByHand) -> None:
    """Around a ring one rank sends out of each node; straight, two ranks send to two."""
    step = hand.step(Placement.owned(Owners((*[0] * (hand.experts - 3), 1, 2, 3), 4)))
    for operator, units in {
        "gather_dense": 3.0,
        "reduce_scatter_dense": 2 * 2 / 4,
        "gather_experts": 3.0 * (hand.experts - 3),
        # Into the first node: both other ranks send it the gradients of what it owns.
        "reduce_scatter_experts": 2.0 * (hand.experts - 2),
    }.items():
        assert hand.alone(operator, 1e5, SPEC, step) == pytest.approx(units), operator


def test_a_captured_model_has_its_collectives_in_the_order_of_training(made: Capture) -> None:
    symbols: dict[Any, Any] = {}
    forward, backward = (program_of(graph, symbols) for graph in made.graphs)
    for program, experts in ((forward, "sparse_all_gather"), (backward, "sparse_reduce_scatter")):
        names = [item.operator for item in program if isinstance(item, Start)]
        assert [names.count(name) for name in ("exchange", "exchange_back", experts)] == [len(made.layers)] * 3
        started = [item.token for item in program if isinstance(item, Start)]
        assert sorted(item.token for item in program if isinstance(item, Wait)) == started
    assert {meaning.what for meaning in symbols.values()} >= {"rows", "replicas"}


def test_more_rows_take_longer_and_even_rows_are_fastest(made: Capture) -> None:
    slow, found = replace(SPEC, flops=1e6), []
    for workload in ("balanced", "zipf", "one_hot"):
        prediction = Simulator(made, slow).step(routed(made, workload, slow))
        assert (prediction.waited >= -1e-9).all()
        assert prediction.seconds >= prediction.compute.max()
        found.append(prediction.seconds)
    assert found[0] < found[1] < found[2]


def test_plans_know_that_rematerialized_experts_come_twice(made: Capture) -> None:
    again = captured(rematerialize=True, layers=1)
    assert {layer.sizes.expert_transfers for layer in made.layers} == {2}
    assert {layer.sizes.expert_transfers for layer in again.layers} == {3}


def test_memory_counts_states_and_replicas(made: Capture, hand: ByHand) -> None:
    layers, size = len(made.layers), made.layers[0].sizes.expert_bytes
    plain = count_memory(made, [hand.step()] * layers, optimizer_bytes=8)
    dense = sum(count * (2 * bytes + 8) for count, bytes in made.dense)
    mine = hand.experts // 4
    assert plain.states == dense + layers * mine * size * 4
    # Gradients of one layer's experts on their way.
    assert plain.slots == mine * size
    replicated = [hand.step(hand.placement({3}))] * layers
    # Rank 3 holds a replica in every layer, and gradients of one layer's own experts and replica.
    assert count_memory(made, replicated, optimizer_bytes=8).slots == (layers + mine + 1) * size
    few = count_memory(made, replicated, optimizer_bytes=8, rematerialize=True)
    assert few.slots == (min(2, layers) + mine + 1) * size


def test_a_policy_sees_earlier_steps_only(made: Capture) -> None:
    experts = made.layers[0].num_experts
    counts = make("one_hot", steps=3, layers=1, ranks=4, experts=experts, rows=1000)
    given: dict[str, Any] = {"topology": SPEC.topology, "rates": replace(SPEC.rates, hidden_seconds=1e9)}
    policy, owners = Hecate(objective="paper", replicas=1), [Owners.contiguous(experts, 4)]
    steps = [
        (number, found) for number, (found,) in walk(policy, counts[None], owners, sizes=made.sizes[:1], **given)
    ]
    assert steps[0][1][0].placement.num_replicas == 0 < steps[1][1][0].placement.num_replicas
    for number, (layer,) in steps:
        assert layer.rows.sum() == counts[number].sum() == layer.computed.sum()


def test_links_serve_first_who_is_ready_first() -> None:
    places = np.asarray([0, 0, 1, 0])
    ready = np.asarray([5.0, 0.0, 2.0, 1.0])
    seconds = np.asarray([1.0, 3.0, 4.0, 1.0])
    # Place 0: 0-3, 3-4, idle, 5-6. Place 1: 2-6.
    assert _serve(places, ready, seconds).tolist() == [6.0, 3.0, 6.0, 4.0]


def late_rank(rank: int, seconds: float) -> Compute:
    """Only one rank computes."""
    operations = np.eye(4)[rank] * seconds * 1e9
    return Compute(operators=1, fixed=(), routed=(lambda sizes: (operations, np.zeros(4)),))


def test_ranks_that_are_early_exchange_before_the_last_comes(hand: ByHand) -> None:
    # Rank 3's 8 rows go to rank 0, which is 20 s late; rank 1's two rows to the other node are through by then.
    items = [late_rank(0, 20.0), hand.start("exchange"), Wait(0)]
    assert hand.seconds(items) == pytest.approx(28.0)
    without = ROWS.copy()
    without[3, 0] = 0
    assert hand.seconds(items, SPEC, hand.step(rows=without)) == pytest.approx(22.0)


def test_gradients_are_added_up_inside_nodes_before_they_cross(hand: ByHand) -> None:
    slow_inside, step = replace(SPEC, rank_bytes=5e4), hand.step(hand.placement({2, 3}))
    # Out: one second to rank 2, and two from there to rank 3, which is late and so waits for nobody's first stage.
    # Back: rank 3 comes after 7 s; two seconds to rank 2, then one to rank 0.
    for operator, expected in (("sparse_all_gather", 9.0), ("sparse_reduce_scatter", 10.0)):
        items = [late_rank(3, 7.0), hand.start(operator), Wait(0)]
        assert hand.seconds(items, slow_inside, step) == pytest.approx(expected), operator


def test_what_is_added_after_the_gate_never_travels_twice(hand: ByHand) -> None:
    """With a lower rank added, another rank receives the expert for its node; who had it already gets nothing."""
    step = replace(hand.step(hand.placement({2, 3})), planned=hand.placement({3}))
    assert hand.alone("top_up", 1e5, SPEC, step) == pytest.approx(1.0)


def test_a_busy_link_delays_the_next_collective(hand: ByHand) -> None:
    rows = np.zeros((4, 4), dtype=np.int64)
    rows[0, 2] = rows[1, 3] = 5
    # 10 rows out of node 0 take 10 s. Ranks 0 and 2 are done after 5, but their second exchange waits for the link.
    items = [hand.start("exchange"), hand.start("exchange", token=1), Wait(0), Wait(1)]
    assert hand.seconds(items, SPEC, hand.step(rows=rows)) == pytest.approx(20)


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
    with pytest.raises(CaptureError, match="graph break"):
        capture(Broken(build("qwen3_moe", layers=1)), {"input_ids": ids, "labels": ids}, SPEC, hecate.Config())
    with pytest.raises(CaptureError, match="exchanges no tokens"):
        captured(layers=1, policy="gather", replicas=0)
    with pytest.raises(CaptureError, match="it is not simulated"):
        captured(layers=1, transport="symmetric")
