"""Rows picked and packed for their way to other ranks, in the dtype in which they travel."""

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, rows_class, runs_on, tl, tuned
from hecate.runtime.kernels.operands import FLOATS, check_index, check_rows, flat_rows, room_for

# Columns are a multiple of 16 bytes for each thread, so loads and stores are vectors.
CONFIGS = (
    {"BLOCK_ROWS": 4, "BLOCK_COLS": 512, "num_warps": 4},
    {"BLOCK_ROWS": 1, "BLOCK_COLS": 1024, "num_warps": 4},
    {"BLOCK_ROWS": 2, "BLOCK_COLS": 2048, "num_warps": 8},
    {"BLOCK_ROWS": 32, "BLOCK_COLS": 64, "num_warps": 4},
)


def gather_rows(
    rows: Tensor,
    index: Tensor,
    dtype: torch.dtype | None = None,
    *,
    used: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the rows ``index`` of ``rows``, one after the other, ``[n, ...]``.

    >>> gather_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0, 1])).tolist()
    [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]

    Args:
        rows: ``[R, ...]``.
        index: int64 ``[n]``, from 0 to R - 1.
        dtype: of the result; by default that of ``out``, or else of ``rows``.
        used: how many of ``index`` mean something, int64 ``[1]``; by default all. The rows after them in the result
            must not be read.
        out: contiguous ``[n, ...]`` to write into and return.
    """
    check_rows("gather_rows", rows)
    check_index("gather_rows", index, rows.device)
    out = room_for("gather_rows", (index.shape[0], *rows.shape[1:]), dtype, rows, out)
    if not (runs_on(rows.device) and rows.dtype in FLOATS and out.dtype in FLOATS):
        return gather_rows_reference(rows, index, out.dtype, out)
    source, count = flat_rows(rows), index.shape[0]
    width = source.shape[1]
    if out.numel() > 0:
        launch(
            _gather_rows,
            lambda meta: -(-count // meta["BLOCK_ROWS"]) * -(-width // meta["BLOCK_COLS"]),
            source,
            index.contiguous(),
            index if used is None else used,
            out,
            count,
            width,
            source.stride(0),
            rows_class(count),
            ALL=used is None,
        )
    return out


def gather_rows_reference(rows: Tensor, index: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Gather rows as :func:`gather_rows` does, in plain torch."""
    if rows.dtype == dtype:
        return torch.index_select(rows, 0, index, out=out)
    picked = rows.index_select(0, index)
    return picked.to(dtype) if out is None else out.copy_(picked)


@tuned(CONFIGS, key=["width", "tuned_for"], varying=["count", "tuned_for"], unaligned=["used"])
def _gather_rows(
    rows,
    index,
    used,
    out,
    count,
    width,
    stride,
    tuned_for,
    ALL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    end = count
    if not ALL:
        end = tl.load(used).to(tl.int32)
    # The columns of a row are next to each other in time, too.
    blocks = tl.cdiv(width, BLOCK_COLS)
    block = tl.program_id(0) // blocks
    r = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = (tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (r < end)[:, None] & (c < width)[None, :]
    # int64, because rows times width may be more than int32 holds.
    source = tl.load(index + r, mask=r < end, other=0)
    values = tl.load(rows + source[:, None] * stride + c[None, :], mask=mask, other=0.0)
    target = r.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(out + target, values.to(out.dtype.element_ty), mask=mask)
