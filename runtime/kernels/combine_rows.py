"""The results of a token's experts, added up with their routing weights."""

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, rows_class, runs_on, tl, tuned
from hecate.runtime.kernels.operands import FLOATS, check_rows, flat_rows

CONFIGS = (
    {"BLOCK_TOKENS": 2, "BLOCK_COLS": 512, "num_warps": 4},
    {"BLOCK_TOKENS": 1, "BLOCK_COLS": 1024, "num_warps": 4},
    {"BLOCK_TOKENS": 1, "BLOCK_COLS": 2048, "num_warps": 8},
    {"BLOCK_TOKENS": 8, "BLOCK_COLS": 128, "num_warps": 4},
)


def combine_rows(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """For each token the sum of its rows times their weights, from the first choice to the last, in float32.

    >>> rows, positions = torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([[2, 0], [1, -1]])
    >>> combine_rows(rows, positions, torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[102.0], [30.0]]

    Args:
        rows: ``[R, ...]``. The kernel takes float32, bfloat16 and float16, the reference any float.
        positions: the rows of each token, int64 ``[T, K]``, below R; -1 for a choice that has none. Not checked.
        weights: a float for each, ``[T, K]``; that of a choice without a row is not looked at.

    Returns:
        ``[T, ...]`` in the dtype of ``rows``, contiguous.

    Raises:
        TypeError: ``positions`` is not int64, or ``rows`` or ``weights`` are no floats.
        ValueError: a shape or a device does not fit.
    """
    check_rows("combine_rows", rows)
    if positions.dtype != torch.int64:
        raise TypeError(f"combine_rows: expected positions of int64, got {positions.dtype}")
    if not (rows.is_floating_point() and weights.is_floating_point()):
        raise TypeError(f"combine_rows: rows of {rows.dtype} and weights of {weights.dtype} are not both floats")
    if positions.dim() != 2 or positions.shape != weights.shape:
        raise ValueError(
            f"combine_rows: expected positions and weights [T, K], got {list(positions.shape)}, {list(weights.shape)}"
        )
    if not rows.device == positions.device == weights.device:
        raise ValueError(
            f"combine_rows: rows, positions and weights are on {rows.device}, {positions.device}, {weights.device}"
        )
    takes = rows.dtype in FLOATS and weights.dtype in FLOATS and rows.shape[0] > 0
    if not (runs_on(rows.device) and takes):
        return combine_rows_reference(rows, positions, weights)
    source, (tokens, choices) = flat_rows(rows), positions.shape
    width = source.shape[1]
    out = torch.empty((tokens, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    if out.numel() > 0:
        launch(
            _combine_rows,
            lambda meta: -(-tokens // meta["BLOCK_TOKENS"]) * -(-width // meta["BLOCK_COLS"]),
            rows.device,
            source, positions.contiguous(), weights.contiguous(), out, tokens, width, source.stride(0),
            rows_class(tokens),
            CHOICES=choices,
        )  # fmt: skip
    return out


def combine_rows_reference(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """:func:`combine_rows` in plain torch; float64 is added up in float64."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    flat = rows.reshape(rows.shape[0], rows.shape[1:].numel())
    total = torch.zeros((positions.shape[0], flat.shape[1]), dtype=wide, device=rows.device)
    if rows.shape[0] > 0:
        for where, weight in zip(positions.unbind(1), weights.unbind(1), strict=True):
            part = flat.index_select(0, where.clamp_min(0)).to(wide) * weight.to(wide).unsqueeze(1)
            total += part.masked_fill((where < 0).unsqueeze(1), 0)
    return total.to(rows.dtype).reshape(positions.shape[0], *rows.shape[1:])


@tuned(CONFIGS, key=["width", "CHOICES", "tuned_for"], varying=["tokens", "tuned_for"])
def _combine_rows(
    rows, positions, weights, out, tokens, width, stride, tuned_for,
    CHOICES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK_COLS)
    block = tl.program_id(0) // blocks
    t = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    c = (tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    first = t.to(tl.int64) * CHOICES
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLS), dtype=tl.float32)
    for choice in range(CHOICES):
        where = tl.load(positions + first + choice, mask=t < tokens, other=-1)
        here = where >= 0
        # A weight that is not looked at may be anything, and 0 times infinity is not 0.
        weight = tl.load(weights + first + choice, mask=here, other=0.0).to(tl.float32)
        mask = here[:, None] & (c < width)[None, :]
        part = tl.load(rows + where[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total = total + part * weight[:, None]
    mask_out = (t < tokens)[:, None] & (c < width)[None, :]
    target = t.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask_out)
