"""Gradients of every slot's matrix, own experts and replicas as two results."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from hecate.runtime.kernels.grouped_mm import check_offsets, fits_registers, precision, takes_products, widens
from hecate.runtime.kernels.launch import launch, rows_class, tl, tuned
from hecate.runtime.kernels.operands import check_alike

CONFIGS = (
    {"BLOCK_A": 64, "BLOCK_B": 64, "BLOCK_ROWS": 32, "num_warps": 4, "num_stages": 3},
    {"BLOCK_A": 64, "BLOCK_B": 128, "BLOCK_ROWS": 32, "num_warps": 4, "num_stages": 4},
    {"BLOCK_A": 128, "BLOCK_B": 128, "BLOCK_ROWS": 32, "num_warps": 8, "num_stages": 3},
    {"BLOCK_A": 128, "BLOCK_B": 128, "BLOCK_ROWS": 64, "num_warps": 8, "num_stages": 3},
)


def weight_grads(left: Tensor, right: Tensor, offs: Tensor, own: Tensor, replicas: Tensor) -> None:
    """Write the product of each slot's rows, ``left.T @ right``, into its matrix. Sums are in float32.

    >>> left, right = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    >>> own, replicas = torch.empty(1, 1, 2), torch.empty(1, 1, 2)
    >>> weight_grads(left, right, torch.tensor([2, 2]), own, replicas)
    >>> own.tolist(), replicas.tolist()
    ([[[70.0, 100.0]]], [[[0.0, 0.0]]])

    Args:
        left, right: ``[R, A]`` and ``[R, B]``, slot by slot. TF32 as in ``grouped_mm``.
        offs: where the rows of each slot end, int32 or int64 ``[E_r + K']``, ascending, at most R.
        own, replicas: ``[E_r, A, B]`` and ``[K', A, B]``, contiguous, overwritten; zeros for a slot without rows.
    """
    _check(left, right, offs, own, replicas)
    if not takes_products(left, right, own, replicas):
        weight_grads_reference(left, right, offs, [own, replicas])
        return
    slots, (a, b) = offs.shape[0], own.shape[1:]
    if slots * a * b == 0:
        return
    left, right = (part if part.stride(1) == 1 else part.contiguous() for part in (left, right))
    launch(
        _weight_grads,
        lambda meta: slots * -(-a // meta["BLOCK_A"]) * -(-b // meta["BLOCK_B"]),
        left,
        right,
        offs.contiguous(),
        own,
        replicas,
        own.shape[0],
        a,
        b,
        left.stride(0),
        right.stride(0),
        rows_class(left.shape[0]),
        PRECISION=precision("ieee"),
        WIDEN=widens(left.dtype),
    )


def weight_grads_reference(left: Tensor, right: Tensor, offs: Tensor, outs: Sequence[Tensor]) -> None:
    """Compute :func:`weight_grads` in plain torch, which reads the offsets on the host."""
    start = 0
    for out, end in zip(chain.from_iterable(outs), offs.tolist(), strict=True):
        if start < end:
            torch.mm(left[start:end].t(), right[start:end], out=out)
        else:
            out.zero_()
        start = end


def _check(left: Tensor, right: Tensor, offs: Tensor, own: Tensor, replicas: Tensor) -> None:
    tensors = (left, right, own, replicas)
    shape = (left.shape[-1], right.shape[-1])
    rows = left.dim() == right.dim() == 2 and left.shape[0] == right.shape[0]
    if not rows or any(out.dim() != 3 or out.shape[1:] != shape for out in (own, replicas)):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"weight_grads: expected [R, A], [R, B], [E_r, A, B], [K', A, B], got {shapes}")
    check_alike("weight_grads", *tensors)
    if not (own.is_contiguous() and replicas.is_contiguous()):
        raise ValueError("weight_grads: writes into contiguous tensors only")
    check_offsets("weight_grads", offs, own.shape[0] + replicas.shape[0], left.device)


@tuned(
    CONFIGS, key=["a_size", "b_size", "PRECISION", "tuned_for"], varying=["owned", "tuned_for"], suits=fits_registers
)
def _weight_grads(
    x,
    y,
    offs,
    own,
    replicas,
    owned,
    a_size,
    b_size,
    x_stride,
    y_stride,
    tuned_for,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    blocks_b = tl.cdiv(b_size, BLOCK_B)
    blocks = tl.cdiv(a_size, BLOCK_A) * blocks_b
    slot = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    a = (block // blocks_b) * BLOCK_A + tl.arange(0, BLOCK_A)
    b = (block % blocks_b) * BLOCK_B + tl.arange(0, BLOCK_B)
    begin = tl.load(offs + slot - 1, mask=slot > 0, other=0).to(tl.int32)
    end = tl.load(offs + slot).to(tl.int32)

    # A slot without rows runs no iteration, and its sum is zero.
    total = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    for start in range(begin, end, BLOCK_ROWS):
        r = start + tl.arange(0, BLOCK_ROWS)
        row = r.to(tl.int64)
        left_at = x + row[None, :] * x_stride + a[:, None]
        right_at = y + row[:, None] * y_stride + b[None, :]
        left = tl.load(left_at, mask=(a < a_size)[:, None] & (r < end)[None, :], other=0.0)
        right = tl.load(right_at, mask=(r < end)[:, None] & (b < b_size)[None, :], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)

    place = a.to(tl.int64)[:, None] * b_size + b[None, :]
    mask = (a < a_size)[:, None] & (b < b_size)[None, :]
    if slot < owned:
        target = own + slot.to(tl.int64) * a_size * b_size
    else:
        target = replicas + (slot - owned).to(tl.int64) * a_size * b_size
    tl.store(target + place, total.to(own.dtype.element_ty), mask=mask)
