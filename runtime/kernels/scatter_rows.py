"""Rows brought back to the places from which they left."""

import torch
from torch import Tensor

from hecate.runtime.kernels.gather_rows import CONFIGS
from hecate.runtime.kernels.launch import launch, rows_class, runs_on, tl, tuned
from hecate.runtime.kernels.operands import FLOATS, check_index, check_rows, flat_rows, room_for


def scatter_rows(
    rows: Tensor, index: Tensor, num_rows: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Put row i of ``rows`` at ``index[i]`` of a tensor ``[num_rows, ...]`` that is zero elsewhere.

    >>> scatter_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 0]), 3).tolist()
    [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]

    Args:
        rows: ``[n, ...]``, n at most ``num_rows``.
        index: int64 ``[n]``, from 0 to ``num_rows - 1``, none twice.
        dtype: of the result; by default that of ``out``, or else of ``rows``.
        out: contiguous ``[num_rows, ...]`` to write into and return.
    """
    check_rows("scatter_rows", rows)
    check_index("scatter_rows", index, rows.device, rows.shape[0])
    count = rows.shape[0]
    if count > num_rows:
        raise ValueError(f"scatter_rows: {count} rows for {num_rows} places")
    out = room_for("scatter_rows", (num_rows, *rows.shape[1:]), dtype, rows, out)
    if not (runs_on(rows.device) and rows.dtype in FLOATS and out.dtype in FLOATS):
        return scatter_rows_reference(rows, index, num_rows, out.dtype, out)
    source = flat_rows(rows)
    width = source.shape[1]
    # If as many rows come as there are places, each is written.
    if count < num_rows:
        out.zero_()
    if source.numel() > 0:
        launch(
            _scatter_rows,
            lambda meta: -(-count // meta["BLOCK_ROWS"]) * -(-width // meta["BLOCK_COLS"]),
            source,
            index.contiguous(),
            out,
            count,
            width,
            source.stride(0),
            rows_class(count),
        )
    return out


def scatter_rows_reference(
    rows: Tensor, index: Tensor, num_rows: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Scatter rows as :func:`scatter_rows` does, in plain torch."""
    cast = rows.to(dtype)
    if rows.shape[0] == num_rows:
        # There are rows for all places, so they are gathered. On a CPU torch reads rows up to three times as fast as
        # it writes them.
        inverse = torch.empty_like(index).scatter_(0, index, torch.arange(num_rows, device=index.device))
        return torch.index_select(cast, 0, inverse, out=out)
    out = cast.new_empty((num_rows, *rows.shape[1:])) if out is None else out
    return out.zero_().index_copy_(0, index, cast)


@tuned(CONFIGS, key=["width", "tuned_for"], varying=["count", "tuned_for"])
def _scatter_rows(
    rows, index, out, count, width, stride, tuned_for, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    blocks = tl.cdiv(width, BLOCK_COLS)
    block = tl.program_id(0) // blocks
    r = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    c = (tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (r < count)[:, None] & (c < width)[None, :]
    source = r.to(tl.int64)[:, None] * stride + c[None, :]
    values = tl.load(rows + source, mask=mask, other=0.0)
    target = tl.load(index + r, mask=r < count, other=0)
    tl.store(out + target[:, None] * width + c[None, :], values.to(out.dtype.element_ty), mask=mask)
