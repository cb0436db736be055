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


def rows_of_a_sort(tokens: Tensor, experts: Tensor) -> Tensor:
    return tokens[experts.flatten().argsort(stable=True) // K].sin()


def there_and_back(tokens: Tensor, experts: Tensor) -> Tensor:
    order = torch.sort(experts.flatten(), stable=True)[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return tokens[order // K].sin()[inverse]


def kept(tokens: Tensor, experts: Tensor) -> Tensor:
    """Its backward needs nothing of them; those of the others read the rows again for their sines."""
    return tokens[experts.flatten().argsort(stable=True) // K] * 2.0


def negative(tokens: Tensor, experts: Tensor) -> Tensor:
    return tokens[-1 - experts.flatten().argsort(stable=True) // K].sin()


def divided_by_less(tokens: Tensor, experts: Tensor) -> Tensor:
    return tokens[experts.flatten().argsort(stable=True) // -K].sin()


def of_columns(tokens: Tensor, experts: Tensor) -> Tensor:
    """Not rows that lie one behind the other."""
    return tokens.t()[experts.flatten().argsort(stable=True) // 3].sin()


def single_numbers(tokens: Tensor, experts: Tensor) -> Tensor:
    return tokens[:, 0].contiguous()[experts.flatten().argsort(stable=True) // K].sin()


def numbers_seen_otherwise(tokens: Tensor, experts: Tensor) -> Tensor:
    """The same memory as another dtype: what is seen there need not be what a sort has found."""
    order = torch.sort(experts.flatten(), stable=True)[1]
    return tokens[order.view(torch.float64).view(torch.int64) // K].sin()


def numbers_from_outside(tokens: Tensor, experts: Tensor) -> Tensor:
    return tokens[experts.flatten()].sin()


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (rows_of_a_sort, 2),
        (there_and_back, 3),
        (kept, 1),
        (negative, 0),
        (divided_by_less, 0),
        (of_columns, 0),
        (single_numbers, 0),
        (numbers_seen_otherwise, 0),
        (numbers_from_outside, 0),
    ],
)
def test_rows_are_copied_where_no_number_is_negative(
    function: Callable[[Tensor, Tensor], Tensor], count: int
) -> None:
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
    model, ids = hecate.compile(build("qwen3_moe"), hecate.Config(backend="aot_eager")), batch(0)
    with torch.set_grad_enabled(training):
        loss = model(input_ids=ids, labels=ids).loss
    if training:
        loss.backward()
    assert len(graphs) == 1 + training
    for gm in graphs:
        read = [node for node in gm.graph.nodes if node.target is aten.index.Tensor]
        assert all(node.args[0].meta["val"].dim() == 1 for node in read)
        # Of each of two layers to experts and back, or gradients the other way.
        assert sum(node.target is aten.index_select.default for node in gm.graph.nodes) >= 2
