"""Grouped products: rows times the matrices of their slots, own experts and replicas as two operands.

Offsets stay on the device: the host launches as many programs as there can be tiles of rows, each finds its tile from
the offsets, and those without one end at once.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import INTERPRETED, launch, on_amd, rows_class, runs_on, tl, tuned
from hecate.runtime.kernels.operands import FLOATS, check_alike

# Ends of slots that a program reads at once.
SLOTS = 128

CONFIGS = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
)


def takes_products(*operands: Tensor) -> bool:
    """Tell whether the kernels of grouped products take these operands: floats of one dtype, where kernels run."""
    first = operands[0]
    return (
        runs_on(first.device) and first.dtype in FLOATS and all(operand.dtype == first.dtype for operand in operands)
    )


def grouped_mm(x: Tensor, own: Tensor, replicas: Tensor, offs: Tensor) -> Tensor:
    """Multiply each row by the matrix of its slot: own experts first, then replicas. Sums are in float32.

    >>> x, own = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.eye(2).unsqueeze(0)
    >>> grouped_mm(x, own, 10 * own, torch.tensor([1, 2])).tolist()
    [[1.0, 2.0], [30.0, 40.0], [0.0, 0.0]]

    Args:
        x: rows ``[R, K]``, slot by slot. float32 is multiplied in TF32 if ``torch.backends.cuda.matmul`` says so.
        own, replicas: ``[E_r, K, N]`` and ``[K', K, N]`` with any strides; either may be empty.
        offs: where the rows of each slot end, int32 or int64 ``[E_r + K']``, ascending, at most R; rows ``[R, N]`` of
            the result beyond the last are zero.
    """
    if x.dim() != 2 or own.dim() != 3 or own.shape[1:] != replicas.shape[1:] or x.shape[1] != own.shape[1]:
        shapes = f"{list(x.shape)}, {list(own.shape)}, {list(replicas.shape)}"
        raise ValueError(f"grouped_mm: expected [R, K], [E_r, K, N], [K', K, N], got {shapes}")
    check_alike("grouped_mm", x, own, replicas)
    check_offsets("grouped_mm", offs, own.shape[0] + replicas.shape[0], x.device)
    if not takes_products(x, own, replicas):
        return grouped_mm_reference(x, [own, replicas], offs)
    (rows, inner), slots, columns = x.shape, offs.shape[0], own.shape[2]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if inner == 0 or slots == 0:
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    if own.stride()[1:] != replicas.stride()[1:] and own.shape[0] * replicas.shape[0] > 0:
        # One kernel reads both the same way.
        own, replicas = own.contiguous(), replicas.contiguous()
    like = own if own.shape[0] > 0 else replicas
    launch(
        _grouped_mm,
        # Every slot may have one tile that is not full, and so may the rows beyond the last.
        lambda meta: (-(-rows // meta["BLOCK_M"]) + slots + 1) * -(-columns // meta["BLOCK_N"]),
        x,
        own,
        replicas,
        offs.contiguous(),
        out,
        rows,
        slots,
        own.shape[0],
        columns,
        x.stride(0),
        own.stride(0),
        replicas.stride(0),
        like.stride(1),
        like.stride(2),
        rows_class(rows),
        K=inner,
        SLOTS=SLOTS,
        PRECISION=precision("tf32x3"),
        WIDEN=widens(x.dtype),
    )
    return out


def grouped_mm_reference(x: Tensor, operands: Sequence[Tensor], offs: Tensor) -> Tensor:
    """Multiply as :func:`grouped_mm` does, slot by slot in plain torch, which reads the offsets on the host."""
    out = x.new_empty((x.shape[0], operands[0].shape[2]))
    start = 0
    for w, end in zip(chain.from_iterable(operands), offs.tolist(), strict=True):
        if start < end:
            torch.mm(x[start:end], w, out=out[start:end])
        start = end
    out[start:].zero_()
    return out


def check_offsets(who: str, offs: Tensor, slots: int, device: torch.device) -> None:
    """Raise TypeError or ValueError unless ``offs`` are the ends of so many slots."""
    if offs.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{who}: expected offsets of int32 or int64, got {offs.dtype}")
    if offs.shape != (slots,):
        raise ValueError(f"{who}: {slots} slots, but offsets {list(offs.shape)}")
    if offs.device != device:
        raise ValueError(f"{who}: the offsets are on {offs.device}, the rows are on {device}")


def precision(exact: str) -> str:
    """Return Triton's name of the way to multiply float32: "tf32" if torch says so, else ``exact``; on AMD "ieee".

    ``exact`` is "ieee", number by number, or "tf32x3", three products of TF32, which has the smaller error and is
    four times as fast where tiles fit (docs/gpu.md).
    """
    # Triton has TF32 for few of AMD's GPUs.
    if on_amd():
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else exact


def widens(dtype: torch.dtype) -> bool:
    """Tell whether operands must be float32 before they are multiplied: the interpreter cannot multiply bfloat16."""
    return INTERPRETED and dtype == torch.bfloat16


def fits_registers(given: Mapping[str, Any]) -> bool:
    """Tell whether a configuration of a product of ``x`` does without memory beside registers and tiles."""
    # float32 without TF32 is multiplied in a loop that is written out: larger tiles have no room, and compile
    # for seconds.
    numbers = math.prod(size for name, size in given.items() if name.startswith("BLOCK_")) // given["num_warps"]
    return given["x"].dtype != torch.float32 or given["PRECISION"] != "ieee" or numbers <= 65536


@tuned(
    CONFIGS,
    key=["K", "columns", "stride_n", "PRECISION", "tuned_for"],
    varying=["rows", "slots", "owned", "tuned_for"],
    suits=fits_registers,
)
def _grouped_mm(
    x,
    own,
    replicas,
    offs,
    out,
    rows,
    slots,
    owned,
    columns,
    x_stride,
    own_stride,
    replicas_stride,
    stride_k,
    stride_n,
    tuned_for,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # All columns of a tile of rows come first, so that a slot's matrix stays in the cache from tile to tile.
    blocks = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // blocks
    n = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)

    # The slot of the tile; one more slot stands for the rows behind the last offset. The number of slots changes from
    # step to step, and must not make another kernel.
    before = tl.zeros((), dtype=tl.int32)
    slot = tl.zeros((), dtype=tl.int32)
    begin = tl.zeros((), dtype=tl.int32)
    end = tl.zeros((), dtype=tl.int32)
    first = tl.zeros((), dtype=tl.int32)
    for some in range(0, slots + 1, SLOTS):
        s = some + tl.arange(0, SLOTS)
        begins = tl.load(offs + s - 1, mask=(s > 0) & (s <= slots), other=0).to(tl.int32)
        begins = tl.where(s <= slots, begins, rows)
        ends = tl.load(offs + s, mask=s < slots, other=0).to(tl.int32)
        ends = tl.where(s < slots, ends, rows)
        tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
        behind = before + tl.cumsum(tiles, 0)
        # ``chosen`` is true for exactly one slot, which has tiles.
        chosen = (behind > tile) & (behind - tiles <= tile)
        slot += tl.sum(tl.where(chosen, s, 0), 0)
        begin += tl.sum(tl.where(chosen, begins, 0), 0)
        end += tl.sum(tl.where(chosen, ends, 0), 0)
        first += tl.sum(tl.where(chosen, behind - tiles, 0), 0)
        before += tl.sum(tiles, 0)
    if tile >= before:
        return
    m = begin + (tile - first) * BLOCK_M + tl.arange(0, BLOCK_M)

    mask_out = (m < end)[:, None] & (n < columns)[None, :]
    target = out + m.to(tl.int64)[:, None] * columns + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if slot >= slots:
        tl.store(target, total.to(out.dtype.element_ty), mask=mask_out)
        return

    if slot < owned:
        w = own + slot.to(tl.int64) * own_stride
    else:
        w = replicas + (slot - owned).to(tl.int64) * replicas_stride
    k = tl.arange(0, BLOCK_K)
    a_at = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    b_at = w + k.to(tl.int64)[:, None] * stride_k + n.to(tl.int64)[None, :] * stride_n
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        a = tl.load(a_at, mask=(m < end)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at, mask=inside[:, None] & (n < columns)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at = a_at + BLOCK_K
        b_at = b_at + BLOCK_K * stride_k
    tl.store(target, total.to(out.dtype.element_ty), mask=mask_out)
