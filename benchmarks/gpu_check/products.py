"""Grouped products and their weight gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.gpu_check.case import SUMS, Case, Maker
from hecate.runtime.kernels import grouped_mm
from hecate.runtime.kernels import weight_grads as weight_grads_kernel


def products(make: Maker, dtype: torch.dtype) -> Iterator[Case]:
    # As models keep them: the matrix is transposed when it is used.
    own, more = (
        make.numbers(count, 2 * make.sizes.inner, make.sizes.hidden, dtype=dtype).transpose(1, 2)
        for count in (make.sizes.owned, make.sizes.replicas)
    )
    # In the layout of both, as one has them who keeps them together.
    joined = torch.cat([own.transpose(1, 2), more.transpose(1, 2)]).transpose(1, 2)
    offs, x = make.offsets(), make.numbers(make.rows, make.sizes.hidden, dtype=dtype)
    yield _product("own, replicas", x, (own, more), joined, offs)
    yield _product("one operand", x, (joined, joined[:0]), joined, offs)


def _product(note: str, x: Tensor, operands: tuple[Tensor, Tensor], joined: Tensor, offs: Tensor) -> Case:
    used = int(offs[-1])

    def by_torch() -> Tensor:
        """With what its product needs: two operands are joined, and rows that it leaves as they were are cleared."""
        out: Tensor = torch.ops.hecate.grouped_mm(x, torch.cat(operands) if len(operands[1]) else joined, offs)
        return out

    return Case(
        x.dtype,
        lambda: grouped_mm.grouped_mm(x, *operands, offs),
        lambda: grouped_mm.grouped_mm_reference(x, [joined], offs),
        by_torch if _has_grouped_mm(x) else None,
        SUMS,
        note=note,
        same=True,
        flops=2 * used * joined[0].numel(),
        bound=lambda: x[:used] @ joined[0],
    )


def _has_grouped_mm(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16


def weight_grads(make: Maker, dtype: torch.dtype) -> Case:
    hidden, inner, offs = make.sizes.hidden, make.sizes.inner, make.offsets()
    left = make.numbers(make.rows, 2 * inner, dtype=dtype)
    right, used = make.numbers(make.rows, hidden, dtype=dtype), int(offs[-1])
    outs = [
        torch.empty(count, 2 * inner, hidden, dtype=dtype, device=make.device)
        for count in (make.sizes.owned, make.sizes.replicas)
    ]

    def by_kernel() -> list[Tensor]:
        weight_grads_kernel.weight_grads(left, right, offs, *outs)
        return outs

    def by_loop() -> list[Tensor]:
        found = [torch.empty_like(out) for out in outs]
        weight_grads_kernel.weight_grads_reference(left, right, offs, found)
        return found

    def by_torch() -> Sequence[Tensor]:
        owned, replicas = (len(one) for one in outs)
        found: Sequence[Tensor] = torch.ops.hecate.grouped_mm_pair_weight_grad(
            left, right, offs, owned, replicas, False
        )
        return found

    return Case(
        dtype,
        by_kernel,
        by_loop,
        by_torch if _has_grouped_mm(left) else None,
        SUMS,
        same=True,
        flops=2 * used * hidden * 2 * inner,
        # As many multiply-adds as the rows of all slots take.
        bound=lambda: left[:used].t() @ right[:used],
    )
