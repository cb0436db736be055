"""Operators that compute on slots.

| operator | shapes | backward |
|---|---|---|
| ``grouped_mm`` | ``[R,K], [S,K,N], [S] -> [R,N]`` | ``grouped_mm`` and ``grouped_mm_weight_grad`` |
| ``grouped_mm_weight_grad`` | ``[R,K], [R,N], [S] -> [S,K,N]`` | none |
| ``grouped_mm_pair`` | ``[R,K], [E_r,K,N], [K',K,N], [S] -> [R,N]``, own experts and replicas | the pair below |
| ``grouped_mm_pair_weight_grad`` | ``[R,K], [R,N], [S] -> [E_r,K,N], [K',K,N]`` | none |
| ``row_slots`` | ``[S] -> [R]``, the slot of each row, S for rows behind the last offset | none |
| ``sizes_to_offsets`` | ``S`` sizes to ``[S]``, where each slot's rows end | none |

Rows behind the last offset are zero in a product. ``filled`` says that there are none: on GPUs they
are a launch of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hecate.private import check
from hecate.private import grouped_mm as grouped_mm_of_torch
from hecate.runtime.comm.collectives import on_device
from hecate.runtime.kernels import clear_rows, weight_grads
from hecate.runtime.kernels import grouped_mm as products
from hecate.runtime.kernels.launch import nvidia_capability
from hecate.runtime.ops.registration import define, differentiate

# The most groups that torch's kernel takes in one call.
_MOST_GROUPS = 1023


def _choose(x: Tensor, others: Sequence[Tensor], offs: Tensor) -> Literal["torch", "kernel", "loop"]:
    """Choose who multiplies ``x`` with ``others``, each ``[S, K, N]`` or rows ``[R, N]``."""
    # torch's own kernel where it takes the operands as they are, else Hecate's, else a loop. torch's takes one
    # operand; on a GPU without Triton two are joined for it.
    native = fits_torchs_kernel(x, others[0], offs) and x.shape[0] > 0
    if not (native and len(others) == 1) and products.takes_products(x, *others):
        return "kernel"
    return "torch" if native else "loop"


def fits_torchs_kernel(x: Tensor, other: Tensor, offs: Tensor) -> bool:
    """Tell whether torch's own kernel takes rows ``x`` ``[R, K]`` and ``other``, ``[S, K, N]`` or rows ``[R, N]``."""
    return (
        _has_kernel(x)
        and x.dtype == other.dtype == torch.bfloat16
        and 0 < offs.shape[0] <= _MOST_GROUPS
        and all(size * x.element_size() % 16 == 0 for size in (x.shape[1], *other.shape[1:]))
    )


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and _is_capable(x.device)


@functools.cache
def _is_capable(device: torch.device) -> bool:
    # Other GPUs get a loop from torch, for which the host waits, and AMD's may have other rules.
    return (nvidia_capability(device) or (0, 0))[0] in (9, 10)


def writes_empty_slots(device: torch.device) -> bool:
    """Tell whether torch's kernel writes zeros into the gradient of a slot without rows."""
    # On 10 it may leave there the content of the accumulator (CUTLASS issue 2674).
    return nvidia_capability(device) == (9, 0)


def _for_kernel(operand: Tensor) -> Tensor:
    """Return ``operand`` with one of its last two dimensions without gaps, and all else at multiples of 16 bytes."""
    *others, last, first = sorted(operand.stride(), reverse=True)
    steps = (operand.data_ptr() // operand.element_size(), *others, last)
    fits = first == 1 in operand.stride()[-2:] and all(step * operand.element_size() % 16 == 0 for step in steps)
    return operand if fits else operand.clone(memory_format=torch.contiguous_format)


def _grouped_mm(x: Tensor, w: Tensor, offs: Tensor, filled: bool = False) -> Tensor:
    return _product(x, [w], offs, filled)


def _grouped_mm_pair(x: Tensor, own: Tensor, replicas: Tensor, offs: Tensor, filled: bool = False) -> Tensor:
    return _product(x, [own, replicas] if replicas.shape[0] > 0 else [own], offs, filled)


def _product(x: Tensor, operands: Sequence[Tensor], offs: Tensor, filled: bool) -> Tensor:
    how = _choose(x, operands, offs)
    if how == "loop":
        return products.grouped_mm_reference(x, operands, offs)
    if how == "kernel":
        own, replicas = operands if len(operands) == 2 else (operands[0], operands[0][:0])
        return products.grouped_mm(x, own, replicas, offs)
    # A copy of the own experts lives as long as this product.
    w = operands[0] if len(operands) == 1 else torch.cat(list(operands))
    out = grouped_mm_of_torch(_for_kernel(x.contiguous()), _for_kernel(w), offs=offs.to(torch.int32))
    if not filled:
        # The kernel leaves rows beyond the last offset unwritten.
        clear_rows.clear_rows_behind(out, offs)
    return out


def _grouped_mm_fake(x: Tensor, w: Tensor, offs: Tensor, filled: bool = False) -> Tensor:
    check(x.dim() == 2 and w.dim() == 3, lambda: f"grouped_mm: {x.shape} @ {w.shape}")
    check(x.shape[1] == w.shape[1], lambda: f"grouped_mm: {x.shape} @ {w.shape}")
    return x.new_empty((x.shape[0], w.shape[2]))


def _grouped_mm_pair_fake(x: Tensor, own: Tensor, replicas: Tensor, offs: Tensor, filled: bool = False) -> Tensor:
    check(own.shape[1:] == replicas.shape[1:], lambda: f"grouped_mm_pair: {own.shape}, {replicas.shape}")
    return _grouped_mm_fake(x, own, offs)


def _grouped_mm_weight_grad(x: Tensor, grad: Tensor, offs: Tensor, transposed: bool) -> Tensor:
    return _grouped_mm_pair_weight_grad(x, grad, offs, offs.shape[0], 0, transposed)[0]


def _grouped_mm_pair_weight_grad(
    x: Tensor, grad: Tensor, offs: Tensor, owned: int, replicas: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    how, (left, right) = _choose(x, [grad], offs), (grad, x) if transposed else (x, grad)
    if how == "torch":
        left, right = (_for_kernel(rows.contiguous()) for rows in (left, right))
        whole = grouped_mm_of_torch(left.t(), right, offs=offs.to(torch.int32))
        if not writes_empty_slots(x.device):
            clear_rows.clear_empty_slots(whole, offs)
        whole = whole.transpose(1, 2) if transposed else whole
        return whole[:owned], whole[owned:]
    outs = _grouped_mm_pair_weight_grad_fake(x, grad, offs, owned, replicas, transposed)
    # A transposed gradient lies in memory row by row the other way round, and is written so.
    of_own, of_replicas = (out.transpose(1, 2) if transposed else out for out in outs)
    if how == "kernel":
        weight_grads.weight_grads(left, right, offs, of_own, of_replicas)
    else:
        weight_grads.weight_grads_reference(left, right, offs, [of_own, of_replicas])
    return outs


def _grouped_mm_pair_weight_grad_fake(
    x: Tensor, grad: Tensor, offs: Tensor, owned: int, replicas: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    return _weight_grad_like(x, grad, owned, transposed), _weight_grad_like(x, grad, replicas, transposed)


def _weight_grad_like(x: Tensor, grad: Tensor, slots: int, transposed: bool) -> Tensor:
    if transposed:
        return x.new_empty((slots, grad.shape[1], x.shape[1])).transpose(1, 2)
    return x.new_empty((slots, x.shape[1], grad.shape[1]))


def _row_slots(offs: Tensor, num_rows: int) -> Tensor:
    rows = torch.arange(num_rows, dtype=offs.dtype, device=offs.device)
    # ``repeat_interleave`` would make the host wait for the device.
    return torch.searchsorted(offs, rows, right=True)


def _sizes_to_offsets(sizes: list[int], like: Tensor) -> Tensor:
    return on_device(np.cumsum(sizes, dtype=np.int64).astype(np.int32), like.device, constant=True)


define(
    "grouped_mm(Tensor x, Tensor w, Tensor offs, bool filled=False) -> Tensor",
    _grouped_mm,
    _grouped_mm_fake,
    results="product",
)
define(
    "grouped_mm_weight_grad(Tensor x, Tensor grad, Tensor offs, bool transposed) -> Tensor",
    _grouped_mm_weight_grad,
    lambda x, grad, offs, transposed: _weight_grad_like(x, grad, offs.shape[0], transposed),
    results="weight_grad",
)
define(
    "grouped_mm_pair(Tensor x, Tensor own, Tensor replicas, Tensor offs, bool filled=False) -> Tensor",
    _grouped_mm_pair,
    _grouped_mm_pair_fake,
    results="product",
)
define(
    "grouped_mm_pair_weight_grad(Tensor x, Tensor grad, Tensor offs, SymInt owned, SymInt replicas, bool transposed) "
    "-> (Tensor, Tensor)",
    _grouped_mm_pair_weight_grad,
    _grouped_mm_pair_weight_grad_fake,
    results="own_weight_grad, replica_weight_grad",
    whole="weight_grads",
)
define(
    "row_slots(Tensor offs, SymInt num_rows) -> Tensor",
    _row_slots,
    lambda offs, num_rows: offs.new_empty((num_rows,), dtype=torch.int64),
    results="row_slots",
)
define(
    "sizes_to_offsets(SymInt[] sizes, Tensor like) -> Tensor",
    _sizes_to_offsets,
    lambda sizes, like: like.new_empty((len(sizes),), dtype=torch.int32),
    results="offsets",
)


def _grouped_mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *weights, offs, ctx.filled = inputs
    # The gradient takes the weight's own memory layout, so that a transposed weight costs no copy.
    ctx.transposed = weights[0].stride(1) == 1 and weights[0].stride(2) != 1
    ctx.save_for_backward(x, *weights, offs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offs = ctx.saved_tensors
    grad_x = grad_w = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hecate.grouped_mm(grad, w.transpose(1, 2), offs, ctx.filled)
    if ctx.needs_input_grad[1]:
        grad_w = torch.ops.hecate.grouped_mm_weight_grad(x, grad, offs, ctx.transposed)
    return grad_x, grad_w, None, None


def _grouped_mm_pair_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, own, replicas, offs = ctx.saved_tensors
    grad_x = grad_own = grad_replicas = None
    if ctx.needs_input_grad[0]:
        turned = own.transpose(1, 2), replicas.transpose(1, 2)
        grad_x = torch.ops.hecate.grouped_mm_pair(grad, *turned, offs, ctx.filled)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        grad_own, grad_replicas = torch.ops.hecate.grouped_mm_pair_weight_grad(
            x, grad, offs, own.shape[0], replicas.shape[0], ctx.transposed
        )
    return grad_x, grad_own, grad_replicas, None, None


differentiate("grouped_mm", _grouped_mm_backward, _grouped_mm_setup)
differentiate("grouped_mm_pair", _grouped_mm_pair_backward, _grouped_mm_setup)


@register_flop_formula([torch.ops.hecate.grouped_mm, torch.ops.hecate.grouped_mm_pair])
def _grouped_mm_flops(x_shape: Any, w_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Count two operations per multiply-add, for all rows: ``2 R K N``."""
    return 2 * x_shape[0] * w_shape[1] * w_shape[2]


@register_flop_formula([torch.ops.hecate.grouped_mm_weight_grad, torch.ops.hecate.grouped_mm_pair_weight_grad])
def _grouped_mm_weight_grad_flops(x_shape: Any, grad_shape: Any, offs_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * grad_shape[1]
