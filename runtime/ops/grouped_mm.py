"""Operators that compute on slots.

| operator | shapes | backward |
|---|---|---|
| ``grouped_mm`` | ``[R,K], [S,K,N], [S] -> [R,N]`` | ``grouped_mm`` and ``grouped_mm_weight_grad`` |
| ``grouped_mm_weight_grad`` | ``[R,K], [R,N], [S] -> [S,K,N]`` | none |
| ``row_slots`` | ``[S] -> [R]``, the slot of each row | none |
| ``sizes_to_offsets`` | ``S`` sizes to ``[S]``, where each slot's rows end | none |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hecate.runtime.ops.registration import define, differentiate


def _native_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> bool:
    """Whether torch's own kernel takes these operands: bf16 on CUDA with 16-byte aligned rows."""
    return (
        x.is_cuda
        and x.dtype == w.dtype == torch.bfloat16
        and x.shape[0] > 0
        and w.shape[0] > 0
        and all(size * x.element_size() % 16 == 0 for size in w.shape[1:])
    )


def _grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    if _native_grouped_mm(x, w, offs):
        out = torch._grouped_mm(x.contiguous(), w, offs=offs.to(torch.int32))
        # The kernel leaves rows beyond the last offset unwritten.
        return out.masked_fill_(_padding(offs, x.shape[0]), 0)
    out = x.new_empty((x.shape[0], w.shape[2]))
    start = 0
    for slot, end in enumerate(offs.tolist()):
        if start < end:
            torch.mm(x[start:end], w[slot], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


def _padding(offs: Tensor, num_rows: int) -> Tensor:
    return (torch.arange(num_rows, device=offs.device) >= offs[-1]).unsqueeze(1)


def _grouped_mm_fake(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    torch._check(x.dim() == 2 and w.dim() == 3, lambda: f"grouped_mm: {x.shape} @ {w.shape}")
    torch._check(x.shape[1] == w.shape[1], lambda: f"grouped_mm: {x.shape} @ {w.shape}")
    return x.new_empty((x.shape[0], w.shape[2]))


def _grouped_mm_weight_grad(x: Tensor, grad: Tensor, offs: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return _grouped_mm_weight_grad(grad, x, offs, False).transpose(1, 2)
    slots, k, n = offs.shape[0], x.shape[1], grad.shape[1]
    out = x.new_empty((slots, k, n))
    start = 0
    for slot, end in enumerate(offs.tolist()):
        if start < end:
            torch.mm(x[start:end].t(), grad[start:end], out=out[slot])
        else:
            out[slot].zero_()
        start = end
    return out


def _grouped_mm_weight_grad_fake(x: Tensor, grad: Tensor, offs: Tensor, transposed: bool) -> Tensor:
    if transposed:
        return x.new_empty((offs.shape[0], grad.shape[1], x.shape[1])).transpose(1, 2)
    return x.new_empty((offs.shape[0], x.shape[1], grad.shape[1]))


def _row_slots(offs: Tensor, num_rows: int) -> Tensor:
    slots = torch.arange(offs.shape[0], device=offs.device)
    lengths = torch.diff(offs.to(torch.int64), prepend=offs.new_zeros(1, dtype=torch.int64))
    inside = torch.repeat_interleave(slots, lengths)
    # Padding rows belong to no slot; the last one is as good as any, since they are never read.
    return torch.nn.functional.pad(inside, (0, num_rows - inside.shape[0]), value=max(offs.shape[0] - 1, 0))


def _row_slots_fake(offs: Tensor, num_rows: int) -> Tensor:
    return offs.new_empty((num_rows,), dtype=torch.int64)


def _sizes_to_offsets(sizes: list[int], like: Tensor) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32).to(like.device)


def _sizes_to_offsets_fake(sizes: list[int], like: Tensor) -> Tensor:
    return like.new_empty((len(sizes),), dtype=torch.int32)


define("grouped_mm(Tensor x, Tensor w, Tensor offs) -> Tensor", _grouped_mm, _grouped_mm_fake)
define(
    "grouped_mm_weight_grad(Tensor x, Tensor grad, Tensor offs, bool transposed) -> Tensor",
    _grouped_mm_weight_grad,
    _grouped_mm_weight_grad_fake,
)
define("row_slots(Tensor offs, SymInt num_rows) -> Tensor", _row_slots, _row_slots_fake)
define("sizes_to_offsets(SymInt[] sizes, Tensor like) -> Tensor", _sizes_to_offsets, _sizes_to_offsets_fake)


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offs = inputs
    # The gradient takes the weight's own memory layout, so that a transposed weight costs no copy.
    ctx.transposed = w.stride(1) == 1 and w.stride(2) != 1
    ctx.save_for_backward(x, w, offs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offs = ctx.saved_tensors
    grad_x = grad_w = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hecate.grouped_mm(grad, w.transpose(1, 2), offs)
    if ctx.needs_input_grad[1]:
        grad_w = torch.ops.hecate.grouped_mm_weight_grad(x, grad, offs, ctx.transposed)
    return grad_x, grad_w, None


differentiate("grouped_mm", _grouped_mm_backward, _grouped_mm_setup)


@register_flop_formula(torch.ops.hecate.grouped_mm)
def _grouped_mm_flops(x_shape: Any, w_shape: Any, offs_shape: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two operations per multiply-add, all rows counted: ``2 R K N``."""
    return 2 * x_shape[0] * w_shape[1] * w_shape[2]


@register_flop_formula(torch.ops.hecate.grouped_mm_weight_grad)
def _grouped_mm_weight_grad_flops(x_shape: Any, grad_shape: Any, offs_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * grad_shape[1]
