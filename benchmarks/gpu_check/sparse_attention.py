"""S2-Attention, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_check.case import SUMS, Case, Maker
from hecate.runtime.attention import s2_attention, s2_blocks
from hecate.runtime.attention.pattern import Pattern


@dataclass(frozen=True)
class _Attention:
    """Operands of S2-Attention, and what computes it on their device."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    pattern: Pattern
    scale: float

    @classmethod
    def of(cls, make: Maker, dtype: torch.dtype) -> _Attention:
        sizes = make.sizes
        q, grad = (make.numbers(1, sizes.heads, sizes.context, sizes.head_width, dtype=dtype) for _ in range(2))
        k, v = (make.numbers(1, sizes.heads // 2, sizes.context, sizes.head_width, dtype=dtype) for _ in range(2))
        pattern = Pattern(block=sizes.block, local=4, stride=4, offset=0, patterns=2)
        return cls(q, k, v, grad, pattern, sizes.head_width**-0.5)

    def forward(self) -> tuple[Tensor, Tensor]:
        if self.q.is_cuda:
            from hecate.runtime.attention.s2_forward import forward

            return forward(self.q, self.k, self.v, self.pattern, self.scale)
        return s2_blocks.forward(self.q, self.k, self.v, self.pattern, self.scale)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = (self.grad, self.q, self.k, self.v, out, lse, self.pattern, self.scale)
        if self.q.is_cuda:
            from hecate.runtime.attention.s2_backward import backward

            return backward(*given)
        return s2_blocks.backward(*given)

    def whole(self) -> Tensor:
        """Causal attention of all tokens by torch."""
        found: Tensor = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, enable_gqa=True)
        return found


def forward(make: Maker, dtype: torch.dtype) -> Case:
    given = _Attention.of(make, dtype)
    return Case(
        dtype,
        lambda: given.forward()[0],
        lambda: s2_attention._dense(given.q, given.k, given.v, given.pattern, given.scale)[0].to(dtype),
        given.whole,
        SUMS,
        flops=s2_attention._flops(given.q.shape, given.k.shape, given.v.shape, None, given.pattern.numbers),
    )


def backward(make: Maker, dtype: torch.dtype) -> Case:
    given = _Attention.of(make, dtype)
    out, lse = given.forward()
    wide = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    with torch.enable_grad():
        whole = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)

    def by_torch() -> Sequence[Tensor]:
        return torch.autograd.grad(whole, wide, given.grad, retain_graph=True)

    return Case(
        dtype,
        lambda: given.backward(out, lse),
        lambda: s2_attention._dense_backward(
            given.grad, given.q, given.k, given.v, out, lse, given.pattern, given.scale
        ),
        by_torch,
        SUMS,
        flops=s2_attention._backward_flops(
            given.grad.shape, given.q.shape, given.k.shape, given.v.shape, None, None, given.pattern.numbers
        ),
    )
