"""Zeros where a grouped product of torch leaves memory unwritten; written memory is not touched."""

import torch
from torch import Tensor

from hecate.runtime.kernels.grouped_mm import check_offsets
from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.operands import FLOATS

# A single configuration: mostly there is nothing to clear, and a program that has nothing to do ends at once.
CONFIGS = ({"BLOCK_ROWS": 16, "BLOCK_COLS": 256, "num_warps": 4},)
PIECES = ({"BLOCK": 4096, "num_warps": 4},)
# Programs that share the matrix of a slot.
_SHARE = 16


def clear_rows_behind(rows: Tensor, offs: Tensor, lost: Tensor | None = None) -> None:
    """Clear the rows that belong to no slot, in place.

    >>> rows = torch.ones(3, 2)
    >>> clear_rows_behind(rows, torch.tensor([1, 2]))
    >>> rows.tolist()
    [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]

    Args:
        rows: ``[R, N]``, contiguous.
        offs: where the rows of each slot end, int32 or int64 ``[S]``, ascending, at most R, S > 0.
        lost: bool ``[]``. If it is true none of the rows is right: all become NaN, or 0 where that is no number.
    """
    if rows.dim() != 2 or not rows.is_contiguous() or offs.numel() == 0:
        raise ValueError(f"clear_rows_behind: expected contiguous [R, N] and slots, got {list(rows.shape)}")
    check_offsets("clear_rows_behind", offs, offs.shape[0], rows.device)
    if not (runs_on(rows.device) and rows.dtype in FLOATS):
        clear_rows_behind_reference(rows, offs, lost)
        return
    count, width = rows.shape
    if rows.numel() > 0:
        launch(
            _clear_rows_behind,
            lambda meta: -(-count // meta["BLOCK_ROWS"]),
            rows,
            offs[-1:],
            offs if lost is None else lost,
            count,
            width,
            MAY_BE_LOST=lost is not None,
        )


def clear_rows_behind_reference(rows: Tensor, offs: Tensor, lost: Tensor | None = None) -> None:
    """Clear rows as :func:`clear_rows_behind` does, in plain torch."""
    behind = torch.arange(rows.shape[0], device=rows.device) >= offs[-1]
    rows.masked_fill_(behind.unsqueeze(1), 0)
    if lost is not None:
        rows.masked_fill_(lost, torch.nan if rows.is_floating_point() else 0)


def clear_empty_slots(matrices: Tensor, offs: Tensor) -> None:
    """Clear the matrices ``[S, A, B]``, contiguous, of slots without rows in place; rows end at ``offs`` ``[S]``.

    >>> matrices = torch.ones(2, 1, 2)
    >>> clear_empty_slots(matrices, torch.tensor([0, 5]))
    >>> matrices.tolist()
    [[[0.0, 0.0]], [[1.0, 1.0]]]
    """
    if matrices.dim() != 3 or not matrices.is_contiguous():
        raise ValueError(f"clear_empty_slots: expected contiguous [S, A, B], got {list(matrices.shape)}")
    check_offsets("clear_empty_slots", offs, matrices.shape[0], matrices.device)
    if not (runs_on(matrices.device) and matrices.dtype in FLOATS):
        clear_empty_slots_reference(matrices, offs)
        return
    if matrices.numel() > 0:
        slots, width = matrices.shape[0], matrices.shape[1:].numel()
        launch(
            _clear_empty_slots,
            lambda meta: slots * _SHARE,
            matrices,
            offs.contiguous(),
            width,
            SHARE=_SHARE,
        )


def clear_empty_slots_reference(matrices: Tensor, offs: Tensor) -> None:
    """Clear matrices as :func:`clear_empty_slots` does, in plain torch."""
    empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    matrices.masked_fill_(empty[:, None, None], 0)


@tuned(CONFIGS, key=[], varying=["count"], unaligned=["last", "lost"])
def _clear_rows_behind(
    rows, last, lost, count, width, MAY_BE_LOST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    end = tl.load(last).to(tl.int32)
    value = 0.0
    if MAY_BE_LOST:
        gone = tl.load(lost) != 0
        end = tl.where(gone, 0, end)
        value = tl.where(gone, float("nan"), 0.0)
    start = tl.program_id(0) * BLOCK_ROWS
    if start + BLOCK_ROWS > end:
        r = start + tl.arange(0, BLOCK_ROWS)
        inside = (r >= end) & (r < count)
        values = (tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32) + value).to(rows.dtype.element_ty)
        for begin in range(0, width, BLOCK_COLS):
            c = begin + tl.arange(0, BLOCK_COLS)
            place = r.to(tl.int64)[:, None] * width + c[None, :]
            tl.store(rows + place, values, mask=inside[:, None] & (c < width)[None, :])


@tuned(PIECES, key=[])
def _clear_empty_slots(matrices, offs, width, SHARE: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0) // SHARE
    begin = tl.load(offs + slot - 1, mask=slot > 0, other=0)
    end = tl.load(offs + slot)
    if begin == end:
        first = matrices + slot.to(tl.int64) * width
        zeros = tl.zeros((BLOCK,), dtype=matrices.dtype.element_ty)
        for start in range((tl.program_id(0) % SHARE) * BLOCK, width, SHARE * BLOCK):
            c = start + tl.arange(0, BLOCK)
            tl.store(first + c, zeros, mask=c < width)
