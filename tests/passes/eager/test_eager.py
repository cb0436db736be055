"""What is done to graphs that run node by node (``backend="aot_eager"``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import hecate
from hecate.graph import lowering
from hecate.passes import PassContext
from hecate.passes.eager.note_row_reads import note_row_reads
from hecate.passes.eager.select_rows import select_rows
from hecate.passes.eager.simplify_views import simplify_views
from tests.support.models import batch, build

aten = torch.ops.aten
CONTEXT = PassContext(world_size=1)
T, K, H = 6, 2, 5


def test_views_that_change_nothing_are_no_calls() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        same = aten.view.default(x, [2, 3])
        return aten.view.default(same.sin(), [6]), aten.view.default(same, [2, 3])

    x = torch.randn(2, 3)
    gm = make_fx(function, tracing_mode="fake")(x)
    before = gm(x)
    simplify_views(gm, CONTEXT)
    gm.recompile()
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [aten.sin.default, aten.reshape.default, aten.reshape.default]
    after = gm(x)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert after[1] is not x, "a result is a view of its own"
    # As where a gradient arrives with other strides than were traced: aten.view would refuse.
    torch.testing.assert_close(gm(x.t().contiguous().t()), before, rtol=0, atol=0)


def test_views_of_sizes_that_vary_stay() -> None:
    gm = make_fx(lambda x: aten.view.default(x, x.shape).sin(), tracing_mode="symbolic")(torch.randn(2, 3))
    simplify_views(gm, CONTEXT)
    gm.recompile()
    assert sum(node.target is aten.reshape.default for node in gm.graph.nodes) == 1
    torch.testing.assert_close(gm(torch.ones(4, 5)), torch.ones(4, 5).sin())


def selected(function: Callable[[Tensor, Tensor], Tensor], *, dynamic: bool = False) -> int:
    """How many reads of ``function(tokens [T, H], experts [T, K])`` and of its backward become copies of rows.

    Results and gradients must be the same, bit for bit.
    """
    torch.manual_seed(0)
    tokens, experts, found = torch.randn(T, H), torch.randint(0, 4, (T, K)), []

    def compile(gm: GraphModule, inputs: list[Any]) -> Any:
        found.append(select_rows(gm, CONTEXT).rewritten)
        gm.recompile()
        gm.graph.lint()
        return boxed_nop(gm, inputs)

    def partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        note_row_reads(joint, CONTEXT)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    backend, results = aot_autograd(fw_compiler=compile, partition_fn=partition), []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)):
        given = tokens.clone().requires_grad_()
        out = run(given, experts)
        results.append([out, *torch.autograd.grad((out * out).sum(), given)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    return sum(found)


def there_and_back(tokens: Tensor, experts: Tensor) -> Tensor:
    order = torch.sort(experts.flatten(), stable=True)[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return tokens[order // K].sin()[inverse]


def order(experts: Tensor) -> Tensor:
    return experts.flatten().argsort(stable=True)


# How many reads become copies, forward and backward.
READS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "rows of a sort": (lambda tokens, experts: tokens[order(experts) // K].sin(), 2),
    "there and back": (there_and_back, 3),
    # Its backward needs nothing of them; those of the others read the rows again for their sines.
    "kept": (lambda tokens, experts: tokens[order(experts) // K] * 2.0, 1),
    "negative": (lambda tokens, experts: tokens[-1 - order(experts) // K].sin(), 0),
    "divided by less": (lambda tokens, experts: tokens[order(experts) // -K].sin(), 0),
    # Not rows that lie one behind the other.
    "of columns": (lambda tokens, experts: tokens.t()[order(experts) // 3].sin(), 0),
    "single numbers": (lambda tokens, experts: tokens[:, 0].contiguous()[order(experts) // K].sin(), 0),
    # The same memory as another dtype: what is seen there need not be what a sort has found.
    "numbers seen otherwise": (
        lambda tokens, experts: tokens[order(experts).view(torch.float64).view(torch.int64) // K].sin(),
        0,
    ),
    "numbers from outside": (lambda tokens, experts: tokens[experts.flatten()].sin(), 0),
}


@pytest.mark.parametrize("name", READS)
def test_rows_are_copied_where_no_number_is_negative(name: str) -> None:
    function, count = READS[name]
    assert selected(function) == count


def test_numbers_of_rows_may_vary() -> None:
    assert selected(there_and_back, dynamic=True) == 3


def test_other_devices_keep_their_reads() -> None:
    """Numbers may be on the host there, which ``index_select`` refuses; and nothing says that it is faster."""

    def function(rows: Tensor, experts: Tensor) -> Tensor:
        return rows[torch.sort(experts)[1]].sin()

    gm = make_fx(function, tracing_mode="fake")(torch.randn(T, H, device="meta"), torch.randint(0, 4, (T,)))
    note_row_reads(gm, CONTEXT)
    assert select_rows(gm, CONTEXT).rewritten == 0


@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_model_reads_its_rows_as_wholes(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, and a forward without gradients, of which there is no joint graph."""
    graphs: list[GraphModule] = []

    def run(gm: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return boxed_nop(gm, inputs)

    monkeypatch.setattr(lowering, "boxed_nop", run)
    model, ids = hecate.compile(build("qwen3_moe", layers=1), hecate.Config(backend="aot_eager")), batch(0)
    with torch.set_grad_enabled(training):
        loss = model(input_ids=ids, labels=ids).loss
    if training:
        loss.backward()
        # Of what is added by a permutation the weights and the results are read, on one rank too.
        (record,) = (r for r in hecate.explain(model).graphs[0].later["joint"] if r.name == "read_permutations")
        assert record.enabled and record.rewritten == 2
    assert len(graphs) == 1 + training
    for gm in graphs:
        read = [node for node in gm.graph.nodes if node.target is aten.index.Tensor]
        assert all(node.args[0].meta["val"].dim() == 1 for node in read)
        # To experts and back, or gradients the other way.
        assert any(node.target is aten.index_select.default for node in gm.graph.nodes)
