"""Piecewise compile: which pieces a graph is cut into, which of them are alike, and what runs between them.

Pieces are interpreted here; ``test_inductor.py`` compiles them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hecate.graph.pieces import compile_in_pieces
from hecate.graph.steps import InPieces, Pieces
from hecate.private import FakeTensorMode, aot_autograd, boxed_nop


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Two that cut: one of a layer's number, one whose result has as many rows as data decide."""
    library = torch.library.Library("hecate", "FRAGMENT")
    library.define("test_send(Tensor rows, int layer) -> Tensor")
    library.impl("test_send", lambda rows, layer: rows + layer, "CompositeExplicitAutograd")
    torch.library.register_fake("hecate::test_send", lambda rows, layer: torch.empty_like(rows), lib=library)
    torch.library.register_autograd("hecate::test_send", _send_back, lib=library)
    library.define("test_receive(Tensor rows, int layer) -> (Tensor, SymInt)")
    library.impl("test_receive", _receive, "CompositeExplicitAutograd")
    torch.library.register_fake("hecate::test_receive", _fake_receive, lib=library)
    yield
    library._destroy()


def _send_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.hecate.test_send(gradient, 0), None


def _receive(rows: Tensor, layer: int) -> tuple[Tensor, int]:
    return rows[: layer + 1].repeat(2, 1), 2 * min(layer + 1, len(rows))


def _fake_receive(rows: Tensor, layer: int) -> tuple[Tensor, Any]:
    many = torch.library.get_ctx().new_dynamic_size()
    return rows.new_empty(many, rows.shape[1]), many


@dataclass
class Interpreted:
    """Compiles pieces by interpreting them, and keeps their graphs."""

    graphs: list[GraphModule] = field(default_factory=list)
    static: list[list[int]] = field(default_factory=list)

    def __call__(self, gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable[[list[Any]], Any]:
        self.graphs.append(gm)
        self.static.append(static)
        assert len(inputs) == len(gm.graph.find_nodes(op="placeholder"))
        return Interpreter(gm).boxed_run


def cut(function: Callable[..., Any], *inputs: Any, static: Sequence[int] = ()) -> tuple[InPieces, Interpreted]:
    traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    compiler = Interpreted()
    return compile_in_pieces(traced, compiler, static), compiler


def check(function: Callable[..., Any], *inputs: Any) -> tuple[InPieces, Interpreted]:
    """Compare with the function itself, twice: a graph keeps nothing of a call."""
    pieces, compiler = cut(function, *inputs)
    for _ in range(2):
        expected = function(*(value.clone() for value in inputs))
        found = pieces([value.clone() for value in inputs])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    return pieces, compiler


def test_layers_that_are_alike_are_compiled_once() -> None:
    def model(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        for layer, weight in enumerate(weights):
            x = torch.ops.hecate.test_send(torch.relu(x @ weight.t()), layer) * 2
        return x, x.sum()

    for layers in (3, 6):
        pieces, _ = check(model, torch.randn(4, 8), *(torch.randn(8, 8) for _ in range(layers)))
        # The first has nothing before it, the last a sum.
        assert pieces.pieces == Pieces(all=layers + 1, different=3)


def test_sizes_that_data_decide_have_a_name_of_their_own_in_each_layer() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        for layer in range(4):
            rows, many = torch.ops.hecate.test_receive(x, layer)
            x = x + (rows * 2).sum(0) / many
        return (x,)

    pieces, _ = check(model, torch.randn(5, 3))
    assert pieces.pieces == Pieces(all=4, different=1)


@pytest.mark.parametrize("what", ["constant", "operator", "size", "dtype", "result"])
def test_what_differs_is_compiled_by_itself(what: str) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x = torch.ops.hecate.test_send(x * 2 + 1, 0)
        other = {
            "constant": lambda: x * 2 + 3,
            "operator": lambda: x * 2 - 1,
            "size": lambda: torch.ops.hecate.test_send(y, 0) * 2 + 1,
            "dtype": lambda: torch.ops.hecate.test_send(x.double(), 0) * 2 + 1,
            "result": lambda: x * 2 + 1,
        }[what]()
        kept = (x * 2,) if what == "result" else ()
        return torch.ops.hecate.test_send(other, 1), *kept

    pieces, _ = check(model, torch.randn(4, 3), torch.randn(5, 3))
    assert pieces.pieces.all == pieces.pieces.different


def test_views_are_taken_where_they_are_read() -> None:
    def model(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        rows, turned = (x + 1).view(2, -1), weight.t()
        halves = torch.ops.hecate.test_send(rows, 0).split(1)
        return halves[0] @ turned, torch.ops.hecate.test_send(turned, 1), rows[0], weight.view(-1)

    pieces, compiler = check(model, torch.randn(2, 3), torch.randn(4, 3))
    first, second = compiler.graphs
    assert [str(node.target) for node in first.graph.nodes if node.op == "call_function"] == ["aten.add.Tensor"]
    assert len(second.graph.find_nodes(op="placeholder")) == 2
    assert pieces.pieces.all == 2


def test_what_is_written_is_read_before_and_after() -> None:
    def model(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
        row = buffer[0]
        before = row * 1
        sent = torch.ops.hecate.test_send(x + row, 0)
        buffer.copy_(sent * 2)
        return before, torch.ops.hecate.test_send(buffer * 3, 1), sent

    x, buffer = torch.randn(2, 3), torch.randn(2, 3)
    pieces, _ = check(model, x, buffer)
    mine, theirs = buffer.clone(), buffer.clone()
    pieces([x, mine])
    model(x, theirs)
    torch.testing.assert_close(mine, theirs)


def test_a_number_of_one_piece_is_known_in_the_others() -> None:
    def model(x: Tensor) -> tuple[Any, ...]:
        many = x.abs().sum().int().item()
        torch._check(many > 0)
        torch._check(many < 1000)
        sent = torch.ops.hecate.test_send(x * 2, 0)
        chosen = sent[sent > 0]
        again = torch.ops.hecate.test_send(chosen, 1) + chosen.shape[0]
        return torch.ops.hecate.test_send(x.new_zeros(many) + again.sum(), 2), again

    traced = trace_with_data(model, torch.full((2, 3), 2.0))
    assert any("_assert_scalar" in str(node.target) for node in traced.graph.nodes)
    pieces = compile_in_pieces(traced, Interpreted())
    for number in (2.0, 3.0):
        found, expected = pieces([torch.full((2, 3), number)]), model(torch.full((2, 3), number))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        pieces([torch.zeros(2, 3)])


def trace_with_data(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """Trace with sizes that data decide, as torch.compile does."""
    found: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: Any) -> Any:
        found.append(gm)
        return boxed_nop(gm, inputs)

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def test_inputs_are_dropped_with_their_last_reader() -> None:
    alive: list[bool] = []

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.hecate.test_send(torch.ops.hecate.test_send(x + 1, 0) * 2 + y, 1),)

    traced = make_fx(model, tracing_mode="fake")(torch.randn(2), torch.randn(2))

    def compile_piece(gm: GraphModule, inputs: list[Any], static: list[int]) -> Any:
        def run(args: list[Any]) -> Any:
            found = Interpreter(gm).boxed_run(args)
            assert not args
            gc.collect()
            alive.append(watched() is not None)
            return found

        return run

    pieces = compile_in_pieces(traced, compile_piece)
    inputs = [torch.randn(2), torch.randn(2)]
    watched = weakref.ref(inputs[0])
    pieces(inputs)
    assert (inputs, alive) == ([], [False, False])


def test_inputs_that_never_move_are_named_in_each_piece() -> None:
    def model(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x = torch.ops.hecate.test_send(x @ weight, 0)
        return torch.ops.hecate.test_send(x @ weight, 1) + y @ weight, x

    _, compiler = cut(model, torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2), static=[1])
    assert compiler.static == [[1], [1]]


def test_a_tensor_of_the_graph_itself() -> None:
    table = torch.arange(6.0).view(2, 3)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.hecate.test_send(x + table, 0) * table, torch.ops.hecate.test_send(table, 1)

    check(model, torch.randn(2, 3))


def test_random_numbers_are_others_in_each_layer_of_one_piece() -> None:
    import torch._inductor.inductor_prims

    def model(x: Tensor) -> tuple[Tensor, ...]:
        seeds = torch.ops.prims.inductor_seeds(3, x.device)
        drawn = []
        for layer in range(3):
            seed = torch.ops.prims.inductor_lookup_seed(seeds, layer)
            drawn.append(torch.ops.prims.inductor_random([4], seed, "rand") * 2)
            x = torch.ops.hecate.test_send(x, layer)
        return x, *drawn

    pieces, _ = cut(model, torch.randn(4))
    assert pieces.pieces == Pieces(all=3, different=1)
    _, *drawn = pieces([torch.randn(4)])
    assert all(bool((one >= 0).all() and (one < 2).all()) for one in drawn)
    assert not torch.equal(drawn[0], drawn[1])


def test_a_graph_without_hecates_operators_is_one_piece() -> None:
    pieces, _ = check(lambda x: (x.sin() + 1, x), torch.randn(3))
    assert pieces.pieces == Pieces(all=1, different=1)


def test_a_size_that_nothing_has_is_told() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        size = mode.shape_env.create_unbacked_symint()
        graph = torch.fx.Graph()
        rows = graph.placeholder("rows")
        rows.meta["val"] = torch.empty(2 * size, 3)
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (rows, 2))
        doubled.meta["val"] = torch.empty(2 * size, 3)
        graph.output((doubled,))
    with pytest.raises(RuntimeError, match=r"is the size u\d+ of one of its pieces.*leave piecewise out"):
        compile_in_pieces(GraphModule(torch.nn.Module(), graph), Interpreted())
