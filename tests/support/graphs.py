"""Small graphs built by hand, as Dynamo would capture them, and a way to compare two of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hecate.passes import Outcome, Pass, PassContext
from hecate.passes.invariants import verify
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.placement.owners import Owners
from tests.support.layers import add_layer

E, H, I, R = 4, 8, 5, 16  # noqa: E741 - I is the inner size, as in docs
# Of graphs that were traced.
ROWS = 6


_kept: list[Any] = []


def number_of(record: Any) -> int:
    """The number of a record that a hand-made graph names. No model keeps the record, so this does."""
    _kept.append(record)
    id: int = record.id
    return id


class GraphUnderTest:
    """Records calls into an FX graph, with the fake value of every node, and keeps real inputs for it."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.inputs: list[torch.Tensor] = []
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        self.layer = number_of(add_layer(name="test", owners=Owners.contiguous(E, 1), world=SINGLE))

    def input(self, value: torch.Tensor) -> Node:
        # Inputs come first, as in a captured graph.
        calls = [n for n in self.graph.nodes if n.op != "placeholder"]
        with self.graph.inserting_before(calls[0]) if calls else nullcontext():
            node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(value)
        node.meta["example_value"] = self.mode.from_tensor(value)
        return node

    def parameter(self, *shape: int) -> Node:
        """A dense parameter, the same on every rank."""
        return self.input(torch.nn.Parameter(torch.randn(*shape)))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._value(self.graph.call_function(target, args, kwargs), target)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            return getattr(first, name)(*rest, **named)

        return self._value(self.graph.call_method(name, args, kwargs), call)

    def _value(self, node: Node, function: Callable[..., Any]) -> Node:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        with self.mode, torch.no_grad():
            node.meta["example_value"] = function(*args, **kwargs)
        return node

    def parts(self, whole: Node, count: int) -> list[Node]:
        """The results of a call that has several."""
        return [self.call(operator.getitem, whole, index) for index in range(count)]

    def experts(self, *shape: int) -> Node:
        """A gathered expert parameter ``[E, *shape]``."""
        shard = self.input(torch.randn(E, *shape))
        return self.call(torch.ops.hecate.gather_experts, shard, E, self.layer)

    def routing(self) -> tuple[Node, Node, Node]:
        """Sorted rows ``[R, H]``, their experts ``[R]`` and offsets ``[E]``, written as transformers writes them."""
        hidden, chosen = self.input(torch.randn(R, H)), self.input(torch.randint(0, E, (R,)))
        ordered = self.call(torch.sort, chosen)
        ids = self.call(operator.getitem, ordered, 0)
        rows = self.call(operator.getitem, hidden, self.call(operator.getitem, ordered, 1))
        counts = self.call(torch.histc, self.method("float", ids), bins=E, min=0, max=E - 1)
        return rows, ids, self.call(torch.cumsum, counts, dim=0, dtype=torch.int32)

    def finish(self, *outputs: Node) -> GraphModule:
        self.graph.output(tuple(outputs))
        return GraphModule(torch.nn.Module(), self.graph)


def targets(gm: GraphModule) -> list[str]:
    """The names of all calls, in order."""
    return [
        node.target if isinstance(node.target, str) else node.target.__name__
        for node in gm.graph.nodes
        if node.op.startswith("call")
    ]


def apply(
    function: Pass, under_test: GraphUnderTest, gm: GraphModule, *, world_size: int = 1, **known: Any
) -> Outcome:
    """Run one pass, verify the result, and check that it computes the same values and gradients.

    Args:
        known: what else the pass knows, of :class:`PassContext`.
    """
    before = _run(gm, under_test.inputs)
    names = {under_test.layer: "model.experts"}
    outcome = function(gm, PassContext(world_size=world_size, layer_names=names, **known))
    verify(gm)
    gm.recompile()
    after = _run(gm, under_test.inputs)
    # own_experts divides by the number of ranks, of which this process is the only one.
    scale = float(world_size) if "own_experts" in targets(gm) else 1.0
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        shard = b is not None and index >= 1 and b.shape[0] == E and b.ndim >= 2
        torch.testing.assert_close(b * scale if shard else b, a)
    return outcome


def leaves_alone(function: Pass, under_test: GraphUnderTest, gm: GraphModule, **known: Any) -> Outcome:
    """:func:`apply` a pass that rewrites nothing: all calls are what they were."""
    before = targets(gm)
    outcome = apply(function, under_test, gm, **known)
    assert (outcome.rewritten, targets(gm)) == (0, before)
    return outcome


def _run(gm: GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The first output, and the gradient of every floating input; in float64, where order hardly matters."""
    floating = [value.is_floating_point() for value in inputs]
    leaves = [
        value.detach().to(torch.float64 if yes else value.dtype, copy=True).requires_grad_(yes)
        for value, yes in zip(inputs, floating, strict=True)
    ]
    out = gm(*leaves)[0]
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def two_layers(layers: int = 2, *, twins: Sequence[int] = ()) -> tuple[GraphModule, list[Any]]:
    """A forward graph: attention (two matmuls), counts, experts between exchanges, and a shared expert, per layer.

    Collectives stand where Dynamo would leave them: everything right where it is used. Beside the rows it returns
    what would be the gradients of the experts, averaged by the records ``twins``, one for each layer, if any.
    """
    ids = [
        number_of(add_layer(name=f"layer{n}", owners=Owners.contiguous(E, 1), world=SINGLE)) for n in range(layers)
    ]
    ops = torch.ops.hecate

    def function(
        x: torch.Tensor,
        dense: list[torch.Tensor],
        shards: list[torch.Tensor],
        placement: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        ticket: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        outs = []
        for layer, weight, shard in zip(ids, dense, shards, strict=True):
            attended = x @ weight @ weight
            # The gate comes behind attention.
            chosen = offsets + attended.sum().mul(0).to(torch.int32)
            ops.gather_counts(chosen, placement, layer).sum()
            (experts,) = ops.sparse_all_gather([shard], placement, slots, layer)
            rows = ops.exchange(attended, *ticket, layer)
            y = ops.grouped_mm_pair(rows, shard.transpose(1, 2), experts.transpose(1, 2), offsets)
            (gradient,) = ops.sparse_reduce_scatter([shard], [experts * 2], placement, E, layer)
            x = ops.exchange_back(y, *ticket, ROWS, layer) + attended @ weight
            outs.append(gradient)
            if twins:
                (outs[-1],) = ops.average_gradients([gradient], [twins[ids.index(layer)]])
        return [x, *outs]

    torch.manual_seed(0)
    inputs = [
        torch.randn(ROWS, H),
        [torch.randn(H, H) for _ in ids],
        [torch.randn(E, H, H) for _ in ids],
        torch.full((E, 1), 2, dtype=torch.int8),
        torch.arange(E),
        torch.tensor([1, 1, 4, 6], dtype=torch.int32),
        [torch.tensor([[ROWS], [ROWS]]), torch.randperm(ROWS), torch.randperm(ROWS)],
    ]
    return make_fx(function, tracing_mode="fake")(*inputs), inputs
