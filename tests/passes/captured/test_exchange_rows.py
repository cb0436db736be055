from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from hecate.passes import PassContext
from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.invariants import verify
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.one_sided.carrier import OneSided
from hecate.runtime.one_sided.exchanges import Exchanges
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import local_windows
from hecate.runtime.placement.planner import Rates
from hecate.runtime.state.layer import get_layer
from tests.support.graphs import E, GraphUnderTest, H, I, R, apply, leaves_alone, targets

Body = Callable[[GraphUnderTest, Node], Node]


def mm(g: GraphUnderTest, x: Node, w: Node, offsets: Node) -> Node:
    return g.call(torch.ops.hecate.grouped_mm.default, x, w, offsets)


def silu(g: GraphUnderTest, x: Node) -> Node:
    return g.call(torch.nn.functional.silu, x)


def region(g: GraphUnderTest, middle: Body = silu, *, bias: bool = False) -> GraphModule:
    """rows @ w_in -> middle -> @ w_out [-> + bias by expert] -> weighted by row."""
    rows, ids, offsets = g.routing()
    x = mm(g, rows, g.experts(H, I), offsets)
    x = mm(g, middle(g, x), g.method("transpose", g.experts(H, I), 1, 2), offsets)
    if bias:
        x = g.call(operator.add, x, g.call(operator.getitem, g.experts(H), ids))
    return g.finish(g.call(operator.mul, x, g.input(torch.rand(R, 1))))


@pytest.mark.parametrize("bias", [False, True])
def test_rewrites_at_several_ranks(bias: bool, g: GraphUnderTest) -> None:
    gm = region(g, bias=bias)
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1
    names = targets(gm)
    assert "gather_experts" not in names
    assert [n for n in names if n.startswith(("route", "exchange"))] == [
        "route.default",
        "exchange.default",
        "exchange_back.default",
    ]
    assert names.count("row_slots.default") == bias
    assert names[-1] == "mul", "the weighting by row stays outside"


@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunks", [2, 3])
def test_rows_in_chunks(chunks: int, bias: bool, replicates: bool, g: GraphUnderTest) -> None:
    gm = region(g, bias=bias)
    assert apply(exchange_rows, g, gm, world_size=2, chunks=chunks, replicates=replicates).rewritten == 1
    names = targets(gm)
    product = "grouped_mm_pair.default" if replicates else "grouped_mm.default"
    moves = [n for n in names if n.startswith("exchange") or n == product]
    # All leave before the first is computed; each returns when it is done.
    of_chunk = [product, product, "exchange_back.default"]
    assert moves == ["exchange.default"] * chunks + of_chunk * chunks
    assert names.count("gather_counts.default") == names.count("route.default") == 1
    assert names.count("transpose") == (2 if replicates else 1), "what is done to parameters is done once"
    assert names.count("row_slots.default") == bias * chunks


@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_a_fixed_number(bias: bool, replicates: bool) -> None:
    """The same graph, in which the route knows how many rows there are; more come than leave."""
    graphs = []
    for percent in (0, 150):
        g = GraphUnderTest()
        gm = region(g, bias=bias)
        if percent:
            transport = Transport(local_windows(1, 4096, SINGLE.device)[0], seconds=1.0)
            get_layer(g.layer).carrier = OneSided(Exchanges(SINGLE, transport), percent)
        known = {"world_size": 2, "replicates": replicates, "room_percent": percent}
        assert apply(exchange_rows, g, gm, **known).rewritten == 1
        graphs.append(gm)
    plain, fixed = (Counter(targets(gm)) for gm in graphs)
    assert not plain - fixed
    # Rows of no slot look up a line of zeros.
    zeros = {"movedim": 2, "pad": 1} if bias else {}
    assert fixed - plain == {"sym_size.int": 1} | zeros
    (route,) = (node for node in graphs[1].graph.nodes if node.target is torch.ops.hecate.route.default)
    (exchange,) = (node for node in graphs[1].graph.nodes if node.target is torch.ops.hecate.exchange.default)
    *_, rows, chunks, _ = route.args
    assert chunks == 1 and rows.args == (exchange.args[0], 0)


def two_calls(g: GraphUnderTest, between: Callable[[Node, Node], Node], *, bias: bool = False) -> GraphModule:
    """The same experts on rows, and on those that ``between`` makes of the results and of another order."""
    w, b = g.experts(H, H), g.experts(H) if bias else None
    rows, ids, offsets = g.routing()
    for turn in range(2):
        x = silu(g, mm(g, rows, w, offsets))
        if b is not None:
            x = g.call(operator.add, x, g.call(operator.getitem, b, ids))
        if turn == 0:
            others, ids, offsets = g.routing()
            rows = between(x, others)
    return g.finish(g.call(operator.mul, x, g.input(torch.rand(R, 1))))


@pytest.mark.parametrize(
    "known",
    [
        {"replicates": False},
        {"replicates": True},
        {"replicates": True, "calibrates": True},
        {"replicates": True, "chunks": 2},
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_that_is_called_twice(bias: bool, known: dict[str, Any], g: GraphUnderTest) -> None:
    gm = two_calls(g, lambda results, others: g.call(operator.add, others, g.method("flip", results, 0)), bias=bias)
    outcome = apply(exchange_rows, g, gm, world_size=2, **known)
    assert (outcome.rewritten, outcome.skipped) == (1, ())
    names = targets(gm)
    assert "gather_experts" not in names
    calls, chunks, replicates = 2, known.get("chunks", 1), known["replicates"]
    for name, times in {
        "place": 1,
        "sparse_all_gather": replicates,
        "gather_counts": calls,
        "route": calls,
        "calibrate": calls * known.get("calibrates", 0),
        "exchange": calls * chunks,
        "exchange_back": calls * chunks,
    }.items():
        assert names.count(f"{name}.default") == times, name
    if "calibrates" not in known:
        assert names.count("hold") == replicates


def test_results_that_are_rows_again_keep_the_gather(g: GraphUnderTest) -> None:
    w, (rows, _, offsets), (_, _, others) = g.experts(H, H), g.routing(), g.routing()
    x = mm(g, mm(g, rows, w, offsets), w, others)
    gm = g.finish(g.call(operator.mul, x, g.input(torch.rand(R, 1))))
    outcome = leaves_alone(exchange_rows, g, gm, world_size=2)
    assert "without being combined" in outcome.skipped[0].reason


def test_results_that_are_used_inside_the_body_are_not_cut(g: GraphUnderTest) -> None:
    rows, _, offsets = g.routing()
    x = mm(g, rows, g.experts(H, I), offsets)
    early = g.method("mean", x)
    y = mm(g, silu(g, x), g.experts(I, H), offsets)
    gm = g.finish(g.call(operator.mul, y, early))
    outcome = apply(exchange_rows, g, gm, world_size=2, chunks=2)
    assert outcome.rewritten == 1
    assert targets(gm).count("exchange.default") == 1
    (skip,) = outcome.skipped
    assert "rows travel in one part" in skip.reason and not skip.fallback and "chunks=1" in skip.fix


LINK = Rates(flops=1e9, rank_bytes=1e6, node_bytes=1e6)


@pytest.mark.parametrize(
    ("known", "chunks"),
    [
        ({"tokens": 10**6, "rates": LINK}, 2),
        ({"tokens": 0, "rates": LINK}, 1),
        ({"tokens": 10, "rates": LINK}, 1),
        ({"tokens": 10**6, "rates": Rates(flops=1e9, rank_bytes=1e15, node_bytes=1e15)}, 1),
        ({"tokens": 10**6, "rates": Rates(flops=1e15, rank_bytes=1e6, node_bytes=1e6)}, 1),
    ],
    ids=["slow link", "one machine", "few tokens", "fast link", "fast compute"],
)
def test_two_chunks_where_they_pay(known: dict[str, Any], chunks: int, g: GraphUnderTest) -> None:
    gm = region(g)
    assert apply(exchange_rows, g, gm, world_size=2, chunks="auto", **known).rewritten == 1
    assert targets(gm).count("exchange.default") == chunks


def test_at_one_rank_rows_are_only_counted(g: GraphUnderTest) -> None:
    gm = region(g, bias=True)
    assert apply(exchange_rows, g, gm, world_size=1).rewritten == 1
    assert targets(gm).count("count_rows.default") == 1
    assert not any(name.startswith("exchange") for name in targets(gm))
    g = GraphUnderTest()
    gm = two_calls(g, lambda results, others: g.call(operator.add, others, g.method("flip", results, 0)))
    assert apply(exchange_rows, g, gm, world_size=1).rewritten == 1
    assert targets(gm).count("count_rows.default") == 2, "each call counts its rows"


@pytest.mark.parametrize(
    "middle",
    [
        lambda g, x: g.call(operator.mul, *_halves(g, g.call(torch.cat, [x, x], -1))),
        lambda g, x: g.call(torch.nn.functional.layer_norm, x, (I,)),
        lambda g, x: g.method("softmax", x, -1),
        lambda g, x: g.method("view", g.method("view", x, -1, I, 1), -1, I),
        lambda g, x: g.call(torch.nn.functional.linear, x, g.parameter(I, I)),
        lambda g, x: g.call(operator.add, x, g.parameter(I)),
        lambda g, x: g.method("clamp", g.method("contiguous", x), min=None, max=1.0),
        lambda g, x: g.call(operator.mul, x, _own(g)),
        lambda g, x: g.call(operator.mul, x, g.method("sum", _own(g), 1, True)),
    ],
    ids=["chunk", "norm", "softmax", "views", "linear", "vector", "clamp", "a vector per row", "a value per row"],
)
def test_rewrites_rowwise_middles(middle: Body, g: GraphUnderTest) -> None:
    assert apply(exchange_rows, g, region(g, middle), world_size=2).rewritten == 1


def _own(g: GraphUnderTest) -> Node:
    """What is computed from this rank's tokens alone, once for each row."""
    return g.call(torch.tanh, g.input(torch.rand(R, I)))


def _then(value: Node, _: Node) -> Node:
    """``value``, after something that was recorded."""
    return value


def _halves(g: GraphUnderTest, x: Node) -> list[Node]:
    parts = g.call(torch.chunk, x, 2, -1)
    return [g.call(operator.getitem, parts, index) for index in range(2)]


@torch.library.custom_op("tests::clone", mutates_args=())
def _mixes_rows(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


_mixes_rows.register_fake(torch.empty_like)
_mixes_rows.register_autograd(lambda ctx, gradient: gradient.flip(0))


# By the reason, and what would help.
REFUSED: dict[tuple[str, str], dict[str, Body]] = {
    ("keep rows apart", "treat each row by itself"): {
        "mean over rows": lambda g, x: g.call(operator.sub, x, g.method("mean", x, 0, True)),
        "cumsum over rows": lambda g, x: g.method("cumsum", x, 0),
        "softmax over rows": lambda g, x: g.method("softmax", x, 0),
        "flip of rows": lambda g, x: g.method("flip", x, 0),
        "an operator of another library": lambda g, x: g.call(torch.ops.tests.clone.default, x),
        "rows times rows": lambda g, x: g.call(operator.matmul, g.call(operator.matmul, x, g.method("t", x)), x),
    },
    ("own tokens", "a column of each row"): {
        "a vector from this rank's tokens": lambda g, x: g.call(operator.mul, x, g.method("amax", _own(g), 0)),
        "scale from this rank's tokens": lambda g, x: g.call(
            operator.mul, x, g.method("amax", g.input(torch.rand(R, 3)))
        ),
    },
    ("another number of rows", "x.shape[0]"): {"number of rows baked in": lambda g, x: g.method("view", x, R, I)},
    ("in-place", "y = y + b"): {
        "in place": lambda g, x: g.method("tanh_", x),
        "in place, result unused": lambda g, x: _then(x, g.method("tanh_", x)),
        "in place through a view": lambda g, x: _then(
            x, g.method("mul_", g.call(operator.getitem, x, (..., slice(0, 2))), 3.0)
        ),
        "masked assignment": lambda g, x: _then(x, g.call(operator.setitem, x, g.call(operator.lt, x, 0.0), 0.0)),
        "inplace=True": lambda g, x: _then(x, g.call(torch.nn.functional.relu, x, inplace=True)),
    },
    ("switched on and off", "with gradients on"): {
        "grad mode": lambda g, x: _then(
            g.call(operator.mul, x, _then(2.0, g.call(torch._C._set_grad_enabled, False))),
            g.call(torch._C._set_grad_enabled, True),
        )
    },
}


@pytest.mark.parametrize(
    ("reason", "fix", "middle"),
    [pytest.param(*said, middle, id=name) for said, middles in REFUSED.items() for name, middle in middles.items()],
)
def test_refuses_with_the_reason(reason: str, fix: str, middle: Body, g: GraphUnderTest) -> None:
    outcome = leaves_alone(exchange_rows, g, region(g, middle), world_size=2)
    skip = outcome.skipped[0]
    assert skip.where == "model.experts" and reason in skip.reason and fix in skip.fix


def _ordered(g: GraphUnderTest, chosen: Any, spelling: str) -> tuple[Any, Any]:
    """Sorted ids, and the order of the rows."""
    if spelling == "argsort":
        order = g.method("argsort", chosen, stable=True)
        return g.call(operator.getitem, chosen, order), order
    if spelling == "gather":
        order = g.call(operator.getitem, g.call(torch.sort, chosen), 1)
        return g.call(torch.gather, chosen, 0, order), order
    down = spelling == "descending"
    ordered = g.method("sort", chosen, 0, True) if down else g.call(torch.sort, chosen)
    return g.call(operator.getitem, ordered, 0), g.call(operator.getitem, ordered, 1)


def _counted(g: GraphUnderTest, chosen: Any, ids: Any, spelling: str) -> Any:
    if spelling in ("eq", "method"):
        column, numbers = g.call(operator.getitem, chosen, (slice(None), None)), g.call(torch.arange, E)
        each = g.call(operator.eq, column, numbers) if spelling == "eq" else g.method("__eq__", column, numbers)
        return g.method("sum", each, 0)
    if spelling == "one_hot":
        return g.method("sum", g.call(torch.nn.functional.one_hot, chosen, E), 0)
    floats = g.method("float", ids if spelling == "histc of sorted" else chosen)
    return g.call(torch.histc, floats, bins=E, min=0, max=E - 1)


@pytest.mark.parametrize(
    "sorting, counting, known",
    [
        ("sort", "histc of sorted", True),
        ("argsort", "histc", True),
        ("gather", "eq", True),
        ("argsort", "method", True),
        ("argsort", "one_hot", True),
        ("repeat", "eq", True),
        ("descending", "histc", False),
        ("other", "eq", False),
    ],
)
def test_biases_by_ids_however_they_are_spelled(sorting: str, counting: str, known: bool, g: GraphUnderTest) -> None:
    hidden, chosen = g.input(torch.randn(R, H)), g.input(torch.randint(0, E, (R,)))
    ids, order = _ordered(g, chosen, sorting)
    counts = _counted(g, chosen, ids, counting)
    if sorting == "repeat":
        ids = g.call(torch.repeat_interleave, g.call(torch.arange, E), counts, output_size=R)
    if sorting == "other":
        ids = g.call(operator.getitem, g.input(torch.randint(0, E, (R,))), order)
    offsets = g.method("to", g.call(torch.cumsum, counts, 0), torch.int32)
    x = mm(g, g.call(operator.getitem, hidden, order), g.experts(H, I), offsets)
    gm = g.finish(g.call(operator.add, x, g.call(operator.getitem, g.experts(I), ids)))
    outcome = apply(exchange_rows, g, gm, world_size=2)
    assert outcome.rewritten == known
    assert known or "the expert of each sorted row" in outcome.skipped[0].reason


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", ["rows", "offsets"])
def test_values_changed_in_place_before_their_use(what: str, world_size: int, g: GraphUnderTest) -> None:
    """An in-place change is no edge of the graph; whoever replaces the value must not miss it."""
    rows, ids, _ = g.routing()
    counts = g.call(torch.histc, g.method("float", ids), bins=E, min=0, max=E - 1)
    offsets = g.method("int", counts)
    if what == "rows":
        g.method("mul_", rows, 2.0)
        offsets = g.method("cumsum", offsets, 0)
    else:
        g.method("cumsum_", offsets, 0)
    gm = g.finish(mm(g, rows, g.experts(H, I), offsets))
    outcome = leaves_alone(exchange_rows, g, gm, world_size=world_size)
    assert "in-place" in outcome.skipped[0].reason
    assert "y = y + b" in outcome.skipped[0].fix


@pytest.mark.parametrize("early", ["rows", "biases"])
def test_rows_and_biases_stand_in_any_order(early: str, g: GraphUnderTest) -> None:
    """Rows are made before their ids are counted without gradients, where no exchange may stand; or biases before."""
    hidden, weight, biases = g.input(torch.randn(R, H)), g.experts(H, I), g.experts(I)
    ordered = g.call(torch.sort, g.input(torch.randint(0, E, (R,))))
    ids, order = (g.call(operator.getitem, ordered, index) for index in range(2))
    if early == "rows":
        rows = g.call(operator.getitem, hidden, order)
        g.call(torch._C._set_grad_enabled, False)
    counts = g.call(torch.histc, g.method("float", ids), bins=E, min=0, max=E - 1)
    offsets = g.call(torch.cumsum, counts, dim=0, dtype=torch.int32)
    if early == "rows":
        g.call(torch._C._set_grad_enabled, True)
    bias = g.method("float", g.call(operator.getitem, biases, ids))
    if early == "biases":
        rows = g.call(operator.getitem, hidden, order)
    gm = g.finish(g.call(operator.add, mm(g, rows, weight, offsets), bias))
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1


def test_refuses_experts_that_meet_no_grouped_matmul(g: GraphUnderTest) -> None:
    rows, _, _ = g.routing()
    gm = g.finish(g.call(torch.matmul, rows, g.experts(H, I)))
    outcome = leaves_alone(exchange_rows, g, gm, world_size=2)
    assert "no grouped matmul" in outcome.skipped[0].reason


def test_other_uses_of_a_parameter_keep_the_gather(g: GraphUnderTest) -> None:
    rows, _, offsets = g.routing()
    weight = g.experts(H, I)
    x = mm(g, rows, weight, offsets)
    penalty = g.method("sum", g.method("square", weight))
    gm = g.finish(g.call(operator.add, x, penalty))
    assert exchange_rows(gm, PassContext(world_size=2)).rewritten == 1
    verify(gm)
    assert "gather_experts" in targets(gm) and "exchange.default" in targets(gm)


def test_two_entries_are_exchanged_each(g: GraphUnderTest) -> None:
    rows, _, offsets = g.routing()
    scaled = g.call(operator.mul, rows, 2.0)
    gate, up = mm(g, rows, g.experts(H, I), offsets), mm(g, scaled, g.experts(H, I), offsets)
    gm = g.finish(mm(g, g.call(operator.mul, gate, up), g.experts(I, H), offsets))
    assert apply(exchange_rows, g, gm, world_size=2).rewritten == 1
    assert targets(gm).count("exchange.default") == 2
    assert targets(gm).count("route.default") == 1
