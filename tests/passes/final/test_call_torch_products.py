"""Products that torch's own kernel takes, here with its implementation for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hecate.passes import PassContext
from hecate.passes.final import call_torch_products as module
from hecate.passes.final.call_torch_products import call_torch_products
from hecate.passes.fx import calls
from hecate.runtime.ops import grouped_mm

hecate = torch.ops.hecate
OFFSETS = torch.tensor([2, 2, 7], dtype=torch.int32)


@pytest.fixture(autouse=True)
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm, "_has_kernel", lambda _: True)
    monkeypatch.setattr(module, "writes_empty_slots", lambda _: True)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def rewritten(function: Any, *operands: Tensor, mode: str = "fake") -> tuple[GraphModule, int]:
    gm = make_fx(function, tracing_mode=mode)(*operands)
    outcome = call_torch_products(gm, PassContext(world_size=1))
    gm.graph.lint()
    gm.recompile()
    return gm, outcome.rewritten


def targets(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_keep_their_numbers(filled: bool, dtype: torch.dtype, transposed: bool) -> None:
    """Rows behind the last offset are zero, whatever the kernel leaves there, and nothing is masked without any."""
    x, stored, offsets = bf16(7 if filled else 9, 16), bf16(3, 8, 16), OFFSETS.to(dtype)
    w = stored.transpose(1, 2) if transposed else stored.transpose(1, 2).contiguous()

    def product(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = hecate.grouped_mm(x, w, offsets, filled)
        return found * 2

    gm, count = rewritten(product, x, w, offsets)
    assert count == 1 and ("aten.where.self" in targets(gm)) is not filled
    assert any(calls(node, torch.ops.aten._grouped_mm) for node in gm.graph.nodes)
    found = gm(x, w, offsets)
    torch.testing.assert_close(found, product(x, w, offsets), rtol=2e-2, atol=2e-2)
    assert not found[7:].any()


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_keep_their_numbers_and_their_layout(transposed: bool) -> None:
    x, grad = bf16(7, 16), bf16(7, 8)

    def gradient(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = hecate.grouped_mm_weight_grad(x, grad, offsets, transposed)
        return found

    gm, count = rewritten(gradient, x, grad, OFFSETS)
    found, expected = gm(x, grad, OFFSETS), gradient(x, grad, OFFSETS)
    assert count == 1 and found.stride() == expected.stride() and not found[1].any()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


ALONE: dict[str, tuple[Any, Sequence[Tensor]]] = {
    "float32": (hecate.grouped_mm, (bf16(9, 16).float(), bf16(3, 16, 8).float(), OFFSETS)),
    "sizes that are no multiple of 16 bytes": (hecate.grouped_mm, (bf16(9, 12), bf16(3, 12, 8), OFFSETS)),
    "rows with gaps": (hecate.grouped_mm, (bf16(9, 36)[:, ::2][:, :16], bf16(3, 16, 8), OFFSETS)),
    "own experts and replicas": (hecate.grouped_mm_pair, (bf16(9, 16), bf16(2, 16, 8), bf16(1, 16, 8), OFFSETS)),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_it_leaves_alone(case: str) -> None:
    operator, operands = ALONE[case]
    gm, count = rewritten(lambda *given: operator(*given), *operands)
    assert count == 0 and not any(calls(node, torch.ops.aten._grouped_mm) for node in gm.graph.nodes)


def test_gradients_are_left_alone_where_the_kernel_writes_none_of_empty_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "writes_empty_slots", lambda _: False)
    operands = bf16(7, 16), bf16(7, 8), OFFSETS
    assert rewritten(lambda *given: hecate.grouped_mm_weight_grad(*given, False), *operands)[1] == 0


def test_only_filled_products_of_an_unknown_number_of_rows() -> None:
    """A mask would need the number, which may depend on data; and a gradient of no rows is not torch's."""
    x, w, grad = bf16(7, 16), bf16(3, 16, 8), bf16(7, 8)
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def with_any(first: DimDynamic, tensor: Tensor) -> Tensor:
        sizes = [first, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    rows, grads = (with_any(DimDynamic.DYNAMIC, one) for one in (x, grad))
    others = [with_any(DimDynamic.STATIC, one) for one in (w, OFFSETS)]
    for filled in (False, True):
        product = partial(lambda filled, *given: hecate.grouped_mm(*given, filled), filled)
        gm, count = rewritten(product, rows, *others, mode="real")
        assert count == filled
    torch.testing.assert_close(gm(x, w, OFFSETS), hecate.grouped_mm(x, w, OFFSETS), rtol=2e-2, atol=2e-2)
    # Nor is anything asked of the number of slots, which depends on data where there are replicas.
    slots = with_any(DimDynamic.DYNAMIC, OFFSETS.clone())
    assert rewritten(product, rows, others[0], slots, mode="real")[1] == 0
    assert mode.shape_env is not None and not mode.shape_env.guards
    gradient = partial(lambda *given: hecate.grouped_mm_weight_grad(*given, False))
    assert rewritten(gradient, rows, grads, others[1], mode="real")[1] == 0
