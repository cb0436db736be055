"""Names, shapes and colours of values in forward and backward graphs."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import hecate
from hecate.passes import FINAL_PASSES, PassContext
from hecate.passes.dumps.printing import Line, letters_of, literal, print_graph, text_of, value_of
from hecate.passes.dumps.value_names import expert_regions, name_values, short_names, source_of
from hecate.passes.fx import Builder, describe, line_of
from hecate.passes.invariants import verify_final
from hecate.passes.runner import run_passes
from hecate.runtime.comm.collective import start_of, wait_of
from hecate.runtime.comm.world import World
from hecate.runtime.ops.gradients import GradientSync, add_replicated, replicate, replicate_bucket
from tests.support.graphs import two_layers


def final() -> tuple[GraphModule, dict[int, str]]:
    """Two MoE layers after the passes on forward graphs, and the names of the layers."""
    gm, _ = two_layers()
    exchange = torch.ops.hecate.exchange.default
    names = {node.args[-1]: f"layers.{n}" for n, node in enumerate(n for n in gm.graph.nodes if n.target is exchange)}
    run_passes(gm, PassContext(world_size=2, layer_names=names), passes=FINAL_PASSES, check=verify_final)
    return gm, names


def test_a_wait_has_the_name_of_its_result_and_a_start_says_so() -> None:
    gm, _ = final()
    names = {node.name for node in gm.graph.nodes}
    assert {"rows_L0", "rows_L1", "results_L0", "results_L1", "replica_L1", "exchange_started_L0"} <= names
    for node in gm.graph.nodes:
        if start_of(node.target) is not None:
            assert re.fullmatch(r"\w+_started_L[01]", node.name), node.name
        elif wait_of(node.target) is not None:
            assert "_started" not in node.name
    gm.recompile()
    gm.graph.lint()


def test_what_depends_on_a_tangent_is_a_gradient() -> None:
    gm, names = final()
    (first, *_) = [node for node in gm.graph.nodes if node.op == "placeholder"]
    first._rename("tangents_1")
    exchange = next(node for node in gm.graph.nodes if node.name == "rows_L0")
    name_values(gm.graph, gm.graph.nodes, short_names(names))
    assert exchange.name == "grad_rows_L0"


def test_lines_know_layer_and_collective_and_the_whole_parses() -> None:
    gm, names = final()
    lines = print_graph(gm, short_names(names), names, part="forward")
    ast.parse("\n".join(line.text for line in lines))
    rows = [line for line in lines if "exchange_start.default" in line.text]
    assert [(line.layer, line.carries) for line in rows] == [("L0", "rows"), ("L1", "rows")]
    assert all("# split_collectives, L" in line.text for line in rows)
    assert Line(text="# L1: layers.1", layer="L1") in lines
    # The product lies between rows that come and results that go.
    products = [line for line in lines if "grouped_mm_pair" in line.text]
    assert [line.layer for line in products] == ["L0", "L1"]


def test_attention_is_in_no_region() -> None:
    gm, names = final()
    regions = expert_regions(gm.graph)
    assert set(regions.values()) == set(names)
    matmuls = [node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert matmuls and not any(node in regions for node in matmuls)


def test_literals_parse() -> None:
    for value in ((1,), [2, (3, None)], slice(1, None), torch.float32, torch.device("cpu"), "a'b", {"k": 1.5}):
        ast.parse(literal(value))
    assert literal((1,)) == "(1,)" and literal(torch.bool) == "torch.bool"


def test_sizes_that_data_decide_have_letters() -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    replicas = environment.create_unbacked_symint()
    with mode:
        placed = (torch.empty(4, 2, dtype=torch.int8), torch.empty(replicas, dtype=torch.int64))
    graph = Graph()
    node = graph.call_function(torch.ops.hecate.place.default, (graph.placeholder("shard"), 0))
    node.meta["example_value"] = placed
    letters = letters_of(graph)
    assert text_of(value_of(node), letters) == "(i8[4, 2], i64[K])"
    assert text_of(torch.zeros(2, 3, dtype=torch.bfloat16), letters) == "bf16[2, 3]"
    assert text_of((replicas, None, 1, 2, 3), letters) == "(Sym(K), ?, int, int, ...)"
    assert text_of(None, letters) == ""


def test_a_builder_knows_what_it_writes() -> None:
    """Values of new nodes, with no guard and no size that the graph's maker would have to account for."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = mode.from_tensor(torch.zeros(6, 8, device="cpu"))
    here = Builder(graph, after=x)
    cut = here.method("chunk", x, 2, -1)
    half = here.call(operator.getitem, cut, 1)
    found = here.method("nonzero", half)
    unknown = here.call(torch.add, found, here.graph.get_attr("nothing"))
    square = here.call(torch.mm, x, here.method("t", x))
    assert not environment.guards and not environment.pending_fresh_unbacked_symbols
    assert str(half.meta["example_value"].shape[0]) == str(x.meta["example_value"].shape[0])
    assert isinstance(found.meta["example_value"].shape[0], torch.SymInt)
    assert "example_value" not in unknown.meta and square.meta["example_value"].dim() == 2


def test_dense_parameters_have_their_names() -> None:
    owner = torch.nn.LayerNorm(4, device="cpu")
    sync = GradientSync(World(rank=0, size=1, group=None, device=torch.device("cpu")))
    records = [add_replicated(owner, key, sync, name=f"model.norm.{key}") for key in ("weight", "bias")]
    graph = Graph()
    x = graph.placeholder("l_self_modules_model_modules_norm_parameters_weight_")
    y = graph.placeholder("l_kwargs_input_ids_")
    x._dynamo_source = SimpleNamespace(name="L['self']._modules['model']._modules['norm']._parameters['weight']")
    y._dynamo_source = SimpleNamespace(name="L['kwargs']['input_ids']")
    wholes = graph.call_function(replicate_bucket, ([x, y], [record.id for record in records]))
    parts = [graph.call_function(operator.getitem, (wholes, index)) for index in (0, 1)]
    average = torch.ops.hecate.average_gradients.default
    averaged = graph.call_function(average, (parts, [record.id for record in records]))
    graph.call_function(operator.getitem, (averaged, 1))
    name_values(graph, graph.nodes, {})
    assert [node.name for node in graph.nodes] == [
        "model_norm_weight",
        "kwargs_input_ids",
        "wholes",
        "whole_model_norm_weight",
        "whole_model_norm_bias",
        "mean_grads",
        "mean_grad_model_norm_bias",
    ]
    assert source_of(x) == "model.norm.weight"
    assert not expert_regions(graph), "a dense parameter is of no layer"
    unknown = graph.call_function(replicate, (x, 10**9))
    name_values(graph, [unknown], {})
    assert unknown.name == "whole"


def node_at(*frames: tuple[str, int, str]) -> Node:
    node = Graph().placeholder("x")
    node.meta["stack_trace"] = "\n".join(f'  File "{f}", line {n}, in forward\n    {code}' for f, n, code in frames)
    return node


def test_the_line_of_model_code_is_not_torchs_own() -> None:
    node = node_at(("/home/me/model.py", 7, "y = self.up(x)"), (torch.nn.functional.__file__, 9, "return linear(x)"))
    line = line_of(node)
    assert line is not None and (str(line), line.code) == ("/home/me/model.py:7", "y = self.up(x)")
    assert describe(node) == "x in 'y = self.up(x)' (model.py:7)"
    reads = str(Path(str(hecate.__file__)).parent / "wrap" / "parameter_reads.py")
    assert str(line_of(node_at(("/home/me/model.py", 7, "y = self.up(x)"), (reads, 1, "p = read(p)")))) == str(line)
    assert line_of(Graph().placeholder("x")) is None


def test_what_operators_check_while_a_builder_writes_is_checked_again_later() -> None:
    environment = ShapeEnv()
    mode, graph = FakeTensorMode(shape_env=environment), Graph()
    with mode:
        values = [torch.empty(environment.create_unbacked_symint(), 4) for _ in range(2)]
    inputs = [graph.placeholder(name) for name in "ab"]
    for node, value in zip(inputs, values, strict=True):
        node.meta["example_value"] = value
    known = environment.num_deferred_runtime_asserts
    Builder(graph, after=inputs[1]).call(torch.add, *inputs)
    assert environment.num_deferred_runtime_asserts == known
    with mode:
        torch.add(*values)
    assert environment.num_deferred_runtime_asserts > known, "both are equally long, which nobody knew"
