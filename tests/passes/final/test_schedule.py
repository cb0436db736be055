"""The passes on forward and backward graphs: what moves where, what stays, and that the numbers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._prims.rng_prims import run_and_save_rng_state
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from hecate.passes import FINAL_PASSES, Pass, PassContext
from hecate.passes.final.collective_notes import notes_in
from hecate.passes.final.in_flight import in_flight
from hecate.passes.final.node_cost import Clock, flops, memory_bytes
from hecate.passes.final.order_collectives import order_collectives
from hecate.passes.final.split_collectives import split_collectives
from hecate.passes.fx import calls
from hecate.passes.invariants import verify_final
from hecate.passes.joint.rematerialize import rematerialize
from hecate.passes.runner import run_passes
from hecate.runtime.comm.collective import collective_named, start_of, whole_of
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.ops.gradients import GradientSync, add_replicated
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner import Rates
from tests.support.graphs import ROWS as R
from tests.support.graphs import E, H, number_of
from tests.support.graphs import two_layers as traced
from tests.support.layers import add_layer

OFFSETS = torch.tensor([1, 1, 4, 6], dtype=torch.int32)
# A link so slow that everything fits behind a transfer.
SLOW = Rates(flops=1e12, rank_bytes=1e-3, node_bytes=1e-3, memory_bytes=1e12)
FAST = Rates(flops=1e3, rank_bytes=1e15, node_bytes=1e15, memory_bytes=1e15)


def names(gm: GraphModule) -> list[str]:
    """Collectives and matmuls in order, with the layer where it says one."""
    first = min(node.args[-3] for node in gm.graph.nodes if node.target is collective_named("exchange").start)
    found = []
    for node in gm.graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if start_of(node.target) is not None:
            found.append(f"{name} {node.args[-3] - first}")
        elif name.endswith("_wait"):
            found.append(f"{name} {node.args[-2] - first}")
        elif name in ("mm", "grouped_mm_pair"):
            found.append(name)
    return found


def context(**options: Any) -> PassContext:
    return PassContext(**({"world_size": 2, "rates": FAST, "owned": E, "slots": 2} | options))


def run(passes: Sequence[Pass], graph: tuple[GraphModule, list[Any]], **options: Any) -> GraphModule:
    """Run passes on a graph, which must then compute and draw the same of its inputs as before."""
    gm, inputs = graph
    torch.manual_seed(0)
    expected = gm(*inputs)
    run_passes(gm, context(**options), passes=passes, check=verify_final)
    torch.manual_seed(0)
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=0)
    return gm


def layer_id(name: str) -> int:
    return number_of(add_layer(name=name, owners=Owners.contiguous(E, 1), world=SINGLE))


def ticket() -> list[Tensor]:
    return [torch.tensor([[R], [R]]), torch.randperm(R), torch.randperm(R)]


def test_split_puts_both_halves_where_the_collective_was() -> None:
    gm, inputs = traced()
    found = [one for node in gm.graph.nodes if (one := whole_of(node.target)) is not None]
    run([split_collectives], (gm, inputs))
    nodes = list(gm.graph.nodes)
    collectives = in_flight(nodes)
    assert [one.start.target for one in collectives] == [one.start for one in found]
    for one in collectives:
        assert nodes.index(one.wait) == nodes.index(one.start) + 1
        kept = [node for node in one.wait.all_input_nodes if node in one.start.all_input_nodes]
        assert not any(node.meta["val"].is_floating_point() for node in kept), "what travels need not be kept"
    empty = [node.meta["val"] for node in nodes if calls(node, torch.ops.aten.new_empty)]
    assert empty and len({tuple(value.shape) for value in empty}) == len(empty), "one stands in for all alike"


def test_schedule_starts_early_and_waits_late() -> None:
    assert names(run(FINAL_PASSES, traced(), prefetch_bytes=10**9)) == [
        # Layer 0's experts come while its attention computes.
        "sparse_all_gather_start 0",
        "mm",
        "mm",
        "gather_counts_start 0",
        "gather_counts_wait 0",
        "exchange_start 0",
        "exchange_wait 0",
        "sparse_all_gather_wait 0",
        "grouped_mm_pair",
        "exchange_back_start 0",
        "mm",
        "exchange_back_wait 0",
        # The next layer's, and then the gradients, in the gap behind the exchange.
        "sparse_all_gather_start 1",
        "sparse_reduce_scatter_start 0",
        "mm",
        "mm",
        "gather_counts_start 1",
        "gather_counts_wait 1",
        "exchange_start 1",
        "exchange_wait 1",
        "sparse_all_gather_wait 1",
        "grouped_mm_pair",
        "exchange_back_start 1",
        "mm",
        "exchange_back_wait 1",
        "sparse_reduce_scatter_start 1",
        # Nobody but the optimizer needs these.
        "sparse_reduce_scatter_wait 0",
        "sparse_reduce_scatter_wait 1",
    ]


def test_a_wait_for_counts_takes_the_rows_beside_it_and_no_numbers() -> None:
    """Where lengths vary, a size that a later start reads may stand there, too: no tensor, and nothing to compute."""
    gm, inputs = traced()
    graph = run([split_collectives], (gm, inputs)).graph
    counts = next(one for one in in_flight(graph.nodes) if one.collective.carries == "counts")
    back = next(one for one in in_flight(graph.nodes) if one.collective.homeward and one.layer == counts.layer)
    there = next(
        one for one in in_flight(graph.nodes) if one.collective.name == "exchange" and one.layer == counts.layer
    )
    rows = there.start.args[0]
    with graph.inserting_before(counts.wait):
        beside = graph.call_function(torch.ops.aten.alias.default, (rows,))
        size = graph.call_function(torch.ops.aten.sym_size.int, (rows, 0))
    beside.meta["val"], size.meta["val"] = rows.meta["val"], rows.meta["val"].shape[0]
    there.start.args = (beside, *there.start.args[1:])
    back.start.args = tuple(size if value == R else value for value in back.start.args)
    gm.recompile()
    run([order_collectives], (gm, inputs))
    assert counts.wait.args[-1] == [beside]


def test_nothing_is_in_flight_without_a_budget() -> None:
    order = names(run(FINAL_PASSES, traced(), prefetch_bytes=0))
    for layer in (0, 1):
        for name in ("sparse_all_gather", "sparse_reduce_scatter"):
            start = order.index(f"{name}_start {layer}")
            assert order[start + 1] == f"{name}_wait {layer}"
    assert order[order.index("exchange_back_start 0") + 1] == "mm", "exchanges still hide behind what is there"


@pytest.mark.parametrize("attention_left", [False, True], ids=["nothing left", "attention left"])
def test_dense_gradients_do_not_hold_up_the_next_exchanges(attention_left: bool) -> None:
    """They leave behind these, unless a matmul is left beside which they can travel."""
    first, second, ops = layer_id("a"), layer_id("b"), torch.ops.hecate
    record = add_replicated(torch.nn.Linear(H, H, bias=False), "weight", GradientSync(SINGLE))

    def backward(x: Tensor, weight: Tensor, ticket: list[Tensor]) -> tuple[Tensor, ...]:
        home = ops.exchange_back(ops.exchange(x, *ticket, first), *ticket, R, first)
        (mean,) = ops.average_gradients([home.t() @ x], [record.id])
        down = home @ weight if attention_left else home.sin()
        experts = ops.exchange(down, *ticket, second) @ weight
        return ops.exchange_back(experts, *ticket, R, second), mean

    inputs = [torch.randn(R, H), torch.randn(H, H), ticket()]
    gm = run(FINAL_PASSES, (make_fx(backward, tracing_mode="fake")(*inputs), inputs))
    nodes = list(gm.graph.nodes)
    place = {(one.collective.name, one.start.args[-3]): one for one in in_flight(nodes) if one.role == "exchange"}
    (mean,) = (one for one in in_flight(nodes) if one.role == "reduce")
    exchange = place["exchange", second]
    (gradient,) = (node for node in mean.start.all_input_nodes if calls(node, torch.ops.aten.mm))
    home = place["exchange_back", second]
    order = [nodes.index(node) for node in (exchange.start, gradient, exchange.wait, home.wait, mean.start)]
    if attention_left:
        assert nodes.index(mean.start) < nodes.index(exchange.start)
    else:
        assert order == sorted(order), "the gradient itself is computed while the rows travel"


@pytest.mark.parametrize("budget", [10**9, 4 * E * H * H * 4, 0])
def test_experts_gradients_go_on_to_their_twins_a_gap_later(budget: int) -> None:
    """The first of two reduces is waited for where the second starts, and neither stands in front of an exchange."""
    module = torch.nn.Linear(H, H, bias=False)
    records = [add_replicated(module, "weight", GradientSync(SINGLE), layer=n) for n in range(3)]
    order = []
    for node in run(FINAL_PASSES, traced(3, twins=[one.id for one in records]), prefetch_bytes=budget).graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name.startswith(("sparse_reduce_scatter", "average_gradients", "exchange_")):
            order.append(name)
    reduce = ["sparse_reduce_scatter_start", "sparse_reduce_scatter_wait", "average_gradients_start"]
    exchanges = ["exchange_start", "exchange_wait", "exchange_back_start", "exchange_back_wait"]
    if budget == 0:
        assert order.count("average_gradients_wait") == 3, "they are waited for at once"
        return
    assert [name for name in order if name in exchanges] == 3 * exchanges
    # By the gaps that they stand in: so many exchanges have come home before.
    gaps = {
        name: [order[:n].count("exchange_back_wait") for n, one in enumerate(order) if one == name] for name in reduce
    }
    assert gaps["sparse_reduce_scatter_start"] == [1, 2, 3]
    assert gaps["average_gradients_start"] == gaps["sparse_reduce_scatter_wait"] == [2, 3, 3]
    for n, name in enumerate(order):
        if name == "average_gradients_start":
            assert order[n - 1] == "sparse_reduce_scatter_wait"
    if budget == 10**9:
        assert order[-3:] == 3 * ["average_gradients_wait"]


def test_compute_that_needs_no_exchange_fills_it() -> None:
    """With a slow link the shared expert's matmul moves before the wait of the first exchange."""
    order = names(run(FINAL_PASSES, traced(), rates=SLOW))
    assert order.index("exchange_start 0") + 1 == order.index("mm", 3)
    assert order[order.index("exchange_start 0") + 2] == "exchange_wait 0"


def backward_of_a_layer() -> tuple[GraphModule, list[Any]]:
    """A backward as autograd writes it: weight gradients between the exchanges, and dense ones before the first."""
    layer = layer_id("layer")
    ops = torch.ops.hecate

    def function(
        grad: Tensor,
        weight: Tensor,
        experts: Tensor,
        kept: Tensor,
        placement: Tensor,
        offsets: Tensor,
        ticket: list[Tensor],
    ) -> list[Tensor]:
        none = experts[:0]
        dense = kept.t() @ grad
        back = grad @ weight
        rows = ops.exchange(back, *ticket, layer)
        first = ops.grouped_mm_weight_grad(kept.sin(), rows, offsets, False)
        inner = ops.grouped_mm(rows, experts, offsets)
        second = ops.grouped_mm_weight_grad(kept.cos(), inner, offsets, False)
        outer = ops.grouped_mm(inner, experts, offsets)
        home = ops.exchange_back(outer, *ticket, R, layer)
        reduced = ops.sparse_reduce_scatter([first, second], [none, none], placement, E, layer)
        return [home @ weight, dense, *reduced]

    torch.manual_seed(0)
    inputs = [
        torch.randn(R, H),
        torch.randn(H, H),
        torch.randn(E, H, H),
        torch.randn(R, H),
        torch.full((E, 1), 2, dtype=torch.int8),
        OFFSETS,
        ticket(),
    ]
    return make_fx(function, tracing_mode="fake")(*inputs), inputs


def steps(gm: GraphModule) -> list[str]:
    """Collectives, matmuls and what the weight gradients read."""
    wanted = ("mm", "grouped_mm", "grouped_mm_weight_grad", "sin", "cos")
    found = [getattr(getattr(node.target, "overloadpacket", None), "__name__", "") for node in gm.graph.nodes]
    return [name for name in found if name in wanted or name.endswith(("_start", "_wait"))]


def test_weight_gradients_come_behind_the_exchange() -> None:
    order = steps(run(FINAL_PASSES, backward_of_a_layer()))
    # A fast link: the dense gradient, which no exchange needs, goes to the last one.
    assert order == [
        "mm",
        "exchange_start",
        "exchange_wait",
        "grouped_mm",
        "grouped_mm",
        "exchange_back_start",
        "mm",
        "sin",
        "grouped_mm_weight_grad",
        "cos",
        "grouped_mm_weight_grad",
        "exchange_back_wait",
        "sparse_reduce_scatter_start",
        "mm",
        "sparse_reduce_scatter_wait",
    ]


def chunks_of_a_layer(backward: bool) -> tuple[GraphModule, list[Any]]:
    """Rows in two chunks: as the pass writes a forward, or as autograd writes its backward."""
    layer = layer_id("layer")
    ops = torch.ops.hecate

    def forward(rows: Tensor, experts: Tensor, offsets: Tensor, ticket: Any) -> Any:
        chunks = [ops.exchange(rows, *ticket, layer) for _ in range(2)]
        home = [ops.exchange_back(ops.grouped_mm(x, experts, offsets), *ticket, R, layer) for x in chunks]
        return home[0] + home[1]

    def reverse(rows: Tensor, experts: Tensor, offsets: Tensor, ticket: Any) -> Any:
        done = []
        for _ in range(2):
            x = ops.exchange(rows, *ticket, layer)
            weight = ops.grouped_mm_weight_grad(x, x, offsets, False)
            done.append((ops.grouped_mm(x, experts, offsets), weight))
        home = [ops.exchange_back(x, *ticket, R, layer) for x, _ in done]
        return home[0] + home[1], done[0][1] + done[1][1]

    torch.manual_seed(0)
    inputs = [torch.randn(R, H), torch.randn(E, H, H), OFFSETS, ticket()]
    return make_fx(reverse if backward else forward, tracing_mode="fake")(*inputs), inputs


@pytest.mark.parametrize("backward", [False, True])
def test_one_chunk_travels_while_another_is_computed(backward: bool) -> None:
    order = steps(run(FINAL_PASSES, chunks_of_a_layer(backward)))
    # Of equal matmuls, those of the weight are last, when nothing waits for them.
    weights = ["grouped_mm_weight_grad"] * 2 if backward else []
    assert order == [
        "exchange_start",
        "exchange_start",
        "exchange_wait",
        "grouped_mm",
        "exchange_back_start",
        "exchange_wait",
        "grouped_mm",
        "exchange_back_start",
        *weights,
        "exchange_back_wait",
        "exchange_back_wait",
    ]


def test_what_a_start_needs_stays_before_it() -> None:
    """With the experts' gradients sent before the exchange, their matmuls stay there."""
    order = steps(run(FINAL_PASSES, backward_of_a_layer(), prefetch_bytes=0))
    assert order.index("sparse_reduce_scatter_start") > order.index("exchange_back_start")
    assert order.index("grouped_mm_weight_grad") > order.index("exchange_back_start")
    gm, inputs = backward_of_a_layer()
    for node in gm.graph.nodes:
        if calls(node, torch.ops.hecate.exchange_back):
            reduced = next(n for n in gm.graph.nodes if calls(n, torch.ops.hecate.sparse_reduce_scatter))
            node.prepend(reduced)
            break
    gm.recompile()
    order = steps(run(FINAL_PASSES, (gm, inputs), prefetch_bytes=0))
    at = order.index("sparse_reduce_scatter_start")
    assert at < order.index("exchange_back_start")
    assert order[:at].count("grouped_mm_weight_grad") == 2


def scheduled(forward: Callable[..., list[Tensor]], dense: list[Tensor]) -> GraphModule:
    """``forward`` of dense tensors, a placement, offsets and a ticket, after the passes."""
    inputs = [*dense, torch.full((E, 1), 2, dtype=torch.int8), OFFSETS, ticket()]
    return run(FINAL_PASSES, (make_fx(forward, tracing_mode="fake")(*inputs), inputs))


def test_counts_leave_before_rows_are_put_in_order() -> None:
    """What lies between the router and counts and is not needed for them comes behind their start, in order."""
    layer = layer_id("counted")
    ops = torch.ops.hecate

    def forward(x: Tensor, router: Tensor, placement: Tensor, offsets: Tensor, ticket: list[Tensor]) -> list[Tensor]:
        before = x.cos()
        logits = before @ router
        scores = logits.softmax(-1)
        rows = before.index_select(0, logits[:, 0].argsort())
        noise = torch.bernoulli(torch.full_like(logits, 0.5).tan())
        counts = ops.gather_counts(offsets + logits.sum().mul(0).to(torch.int32), placement, layer)
        home = ops.exchange_back(ops.exchange(rows, *ticket, layer).sin(), *ticket, R, layer)
        return [home * scores[:, :1] * noise[:, :1] + before, counts]

    gm = scheduled(forward, [torch.randn(R, H), torch.randn(H, E)])
    nodes = list(gm.graph.nodes)
    position = {getattr(node.target, "overloadpacket", None): nodes.index(node) for node in nodes}
    aten, (counts, exchange, _) = torch.ops.aten, sorted(in_flight(nodes), key=lambda one: nodes.index(one.start))
    start = nodes.index(counts.start)
    assert counts.collective.carries == "counts"
    beside = [position[one] for one in (aten._softmax, aten.sort, aten.index_select) if one in position]
    assert len(beside) == 3
    assert start < beside[0] < beside[1] < beside[2] < nodes.index(exchange.start)
    # What the router needs, what counts need, and what is drawn stay.
    assert max(position[one] for one in (aten.cos, aten.mm, aten.sum, aten.tan, aten.bernoulli)) < start


def test_draws_in_front_of_counts_keep_their_order() -> None:
    """Also behind a matmul that no start needs, and inside of an operator that keeps the state of the generator."""
    layer = layer_id("drawn")
    ops = torch.ops.hecate

    def forward(
        x: Tensor, dense: Tensor, router: Tensor, placement: Tensor, offsets: Tensor, ticket: list[Tensor]
    ) -> list[Tensor]:
        hidden = x @ dense
        mask = torch.bernoulli(hidden.sigmoid())
        _, wrapped = run_and_save_rng_state(torch.ops.aten.rand_like.default, (x @ dense.t())[:, :1])
        logits = x @ router
        noisy = logits + torch.rand_like(logits)
        counts = ops.gather_counts(offsets + noisy.sum().mul(0).to(torch.int32), placement, layer)
        home = ops.exchange_back(ops.exchange(x * wrapped, *ticket, layer).sin(), *ticket, R, layer)
        return [home * mask, counts, noisy]

    scheduled(forward, [torch.randn(R, H), torch.randn(H, H), torch.randn(H, E)])


def test_switched_off_everything_stays() -> None:
    gm, inputs = traced()
    expected = gm(*inputs)
    before = list(gm.graph.nodes)
    run_passes(
        gm, context(), passes=FINAL_PASSES, disabled=[p.__name__ for p in FINAL_PASSES], check=GraphModule.recompile
    )
    assert list(gm.graph.nodes) == before
    run_passes(gm, context(), passes=FINAL_PASSES, disabled=["schedule"], check=GraphModule.recompile)
    order = names(gm)
    for index, name in enumerate(order):
        if "_start" in name:
            assert order[index + 1] == name.replace("_start", "_wait")
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=0)


def test_random_numbers_keep_their_order() -> None:
    """A dropout beside the experts does not move before the wait of an exchange, however slow the link is."""
    layer = layer_id("random")

    def function(x: Tensor, w: Tensor, ticket: list[Tensor]) -> Tensor:
        rows = torch.ops.hecate.exchange(x, *ticket, layer)
        noisy = rows * torch.bernoulli(torch.full_like(rows, 0.5))
        return noisy + (x * torch.bernoulli(torch.full_like(x, 0.5))) @ w

    inputs = [torch.randn(R, H), torch.randn(H, H), ticket()]
    run(FINAL_PASSES, (make_fx(function, tracing_mode="fake")(*inputs), inputs), rates=SLOW)


def test_order_is_data_flow_and_labels_say_what_is_predicted() -> None:
    gm = run([split_collectives, order_collectives], traced(), layer_names={}, rates=SLOW)
    starts = [node for node in gm.graph.nodes if start_of(node.target) is not None]
    assert starts[0].args[-2] == []
    for before, start in pairwise(starts):
        assert start.args[-2] == [before]
    spans = notes_in(gm.graph.nodes)
    assert [span.operator for span in spans][:3] == ["gather_counts", "sparse_all_gather", "exchange"]
    # Two of four experts, 8 x 8 float32 each, over a link of a thousandth byte per second.
    assert spans[1].predicted == pytest.approx(2 * 64 * 4 / 1e-3)
    assert spans[1].predicted_bytes == 2 * 64 * 4


def test_rematerialize_tags_gathers_and_their_views_if_asked() -> None:
    for wanted in (False, True):
        gm, _ = traced()
        outcome = rematerialize(gm, context(rematerialize=wanted))
        tagged = [node for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]
        assert outcome.rewritten == (2 if wanted else 0)
        kinds = {_packet(node) for node in tagged}
        assert kinds == ({"sparse_all_gather", "getitem", "transpose"} if wanted else set())


def _packet(node: Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")


def test_costs_are_expressions_in_the_symbols_of_the_graph() -> None:
    gm = make_fx(lambda x, w: (x @ w).relu(), tracing_mode="symbolic")(torch.randn(6, 8), torch.randn(8, 4))
    product, relu = (next(n for n in gm.graph.nodes if _packet(n) == name) for name in ("mm", "relu"))
    clock = Clock(gm, context(rates=Rates(flops=10.0, rank_bytes=1.0, node_bytes=1.0, memory_bytes=1e9)))
    assert flops(product).free_symbols and clock.number(flops(product)) == 2 * 6 * 8 * 4
    assert clock.number(memory_bytes(relu)) == 2 * 6 * 4 * 4
    assert clock.seconds(product) == pytest.approx(2 * 6 * 8 * 4 / 10.0)
    assert flops(relu) == 0


def test_data_dependent_sizes_are_guessed() -> None:
    """Replicas: as many as there is room for. Rows that arrive: as many as leave."""
    layer = layer_id("guessed")
    ops = torch.ops.hecate

    def function(shard: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        placement, held = ops.place(shard, layer)
        (replicas,) = ops.sparse_all_gather([shard], placement, held, layer)
        counts = ops.gather_counts(offsets, placement, layer)
        ends, *ticket = ops.route(counts, placement, offsets, E + held.shape[0], 0, 1, layer)
        return ops.grouped_mm_pair(ops.exchange(rows, *ticket, layer), shard, replicas, ends)

    inputs = torch.randn(E, H, H), torch.randn(R, H), OFFSETS
    gm = make_fx(function, tracing_mode="symbolic")(*inputs)
    product = next(node for node in gm.graph.nodes if _packet(node) == "grouped_mm_pair")
    clock = Clock(gm, context(slots=3, world_size=1))
    assert clock.number(product.args[2].meta["val"].shape[0]) == 3
    assert clock.number(product.args[3].meta["val"].shape[0]) == E + 3
    assert clock.number(flops(product)) == 2 * R * H * H
    # The backward has the same symbols and no route; what was learned is kept.
    assert Clock(GraphModule({}, torch.fx.Graph()), clock.context).guesses == clock.guesses
