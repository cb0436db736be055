"""Packing of all tensors of an expert into one row of one buffer, and back."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.operands import FLOATS, check_index, flat_rows

# An expert is millions of numbers, so a program takes a piece of one.
CONFIGS = (
    {"BLOCK": 2048, "num_warps": 4},
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 4096, "num_warps": 8},
)


def pack_experts(
    tensors: Sequence[Tensor],
    index: Tensor,
    *,
    behind: Sequence[Tensor] = (),
    dtype: torch.dtype | None = None,
    in_first: int | None = None,
) -> Tensor:
    """Pack the experts ``index``, each into one row ``[width]`` with its part of every tensor.

    >>> matrices, biases = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([[5.0], [6.0]])
    >>> pack_experts([matrices, biases], torch.tensor([1, 0])).tolist()
    [[3.0, 4.0, 6.0], [1.0, 2.0, 5.0]]

    Args:
        tensors: ``[E, ...]`` each, of one dtype and at least one.
        index: int64 ``[n]``, from 0 to E + K - 1.
        behind: of each tensor more experts, ``[K, ...]``, which count on from E.
        dtype: of the result; by default that of the tensors.
        in_first: how many of ``index`` are below E. The reference counts them if it is not given and there are
            experts behind, for which the host waits for the device.
    """
    _check("pack_experts", tensors, index)
    if behind:
        _check("pack_experts", behind, index)
        if [t.shape[1:] for t in tensors] != [t.shape[1:] for t in behind] or tensors[0].dtype != behind[0].dtype:
            raise ValueError("pack_experts: the experts behind are of other shapes or dtype")
    like = tensors[0]
    dtype = like.dtype if dtype is None else dtype
    if not (runs_on(like.device) and like.dtype in FLOATS and dtype in FLOATS):
        return pack_experts_reference(tensors, index, behind, dtype, in_first)
    widths = widths_of(tensors)
    out = torch.empty((index.shape[0], sum(widths)), dtype=dtype, device=like.device)
    index, begin = index.contiguous(), 0
    for place, width in enumerate(widths):
        first = flat_rows(tensors[place])
        # The kernel takes two operands; without more experts it never reads the second.
        second = flat_rows(behind[place]) if behind else first[:0]
        if out.shape[0] * width > 0:
            launch(
                _pack_experts,
                _grid(index.shape[0], width),
                first,
                second,
                index,
                out[:, begin:],
                first.shape[0],
                width,
                first.stride(0),
                second.stride(0),
                out.stride(0),
            )
        begin += width
    return out


def pack_experts_reference(
    tensors: Sequence[Tensor],
    index: Tensor,
    behind: Sequence[Tensor],
    dtype: torch.dtype,
    in_first: int | None = None,
) -> Tensor:
    """Pack experts as :func:`pack_experts` does, in plain torch."""
    parts = []
    if in_first is None:
        in_first = int((index < tensors[0].shape[0]).sum()) if behind else len(index)
    for place, first in enumerate(tensors):
        # Mostly all are of the first, and picked without another copy.
        some_behind = behind and in_first < len(index)
        part = _pick(first, behind[place], index, in_first) if some_behind else first.index_select(0, index)
        parts.append(part.to(dtype).reshape(index.shape[0], first.shape[1:].numel()))
    # A single part is a copy already.
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _pick(first: Tensor, second: Tensor, index: Tensor, in_first: int) -> Tensor:
    out, is_first = first.new_empty((index.shape[0], *first.shape[1:])), index < first.shape[0]
    in_second = index.shape[0] - in_first
    for tensor, start, here, count in ((first, 0, is_first, in_first), (second, len(first), ~is_first, in_second)):
        # Its length is known, so nothing is read on the host.
        chosen = torch.nonzero_static(here, size=count).flatten()
        out.index_copy_(0, chosen, tensor.index_select(0, index.index_select(0, chosen) - start))
    return out


def unpack_experts(packed: Tensor, tensors: Sequence[Tensor], index: Tensor) -> None:
    """Write row i of ``packed`` over expert ``index[i]`` of every tensor, in place.

    >>> matrices, biases = torch.zeros(2, 1, 2), torch.zeros(2, 1)
    >>> unpack_experts(torch.tensor([[3.0, 4.0, 6.0]]), [matrices, biases], torch.tensor([1]))
    >>> matrices.tolist(), biases.tolist()
    ([[[0.0, 0.0]], [[3.0, 4.0]]], [[0.0], [6.0]])

    Args:
        packed: ``[n, width]`` in the dtype of the tensors.
        tensors: ``[E, ...]`` each, contiguous, of one dtype and at least one.
        index: int64 ``[n]``, from 0 to E - 1, none twice.
    """
    _check("unpack_experts", tensors, index)
    widths = widths_of(tensors)
    if packed.shape != (index.shape[0], sum(widths)):
        raise ValueError(
            f"unpack_experts: expected [{index.shape[0]}, {sum(widths)}] for these tensors, got {list(packed.shape)}"
        )
    if packed.dtype != tensors[0].dtype:
        raise TypeError(f"unpack_experts: {packed.dtype} comes into tensors of {tensors[0].dtype}")
    if packed.device != index.device:
        raise ValueError(f"unpack_experts: what is packed is on {packed.device}, the index on {index.device}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("unpack_experts: writes into contiguous tensors only")
    if not (runs_on(packed.device) and packed.dtype in FLOATS):
        unpack_experts_reference(packed, tensors, index)
        return
    packed, index, begin = flat_rows(packed), index.contiguous(), 0
    for tensor, width in zip(tensors, widths, strict=True):
        if packed.shape[0] * width > 0:
            launch(
                _unpack_experts,
                _grid(packed.shape[0], width),
                packed[:, begin:],
                index,
                tensor,
                width,
                packed.stride(0),
            )
        begin += width


def unpack_experts_reference(packed: Tensor, tensors: Sequence[Tensor], index: Tensor) -> None:
    """Unpack experts as :func:`unpack_experts` does, in plain torch."""
    parts = packed.split(widths_of(tensors), dim=1)
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.index_copy_(0, index, part.reshape(part.shape[0], *tensor.shape[1:]))


def widths_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how many numbers an expert has in each of ``tensors`` ``[E, ...]``."""
    return [tensor.shape[1:].numel() for tensor in tensors]


def _check(who: str, tensors: Sequence[Tensor], index: Tensor) -> None:
    if not tensors or tensors[0].dim() == 0:
        raise ValueError(f"{who}: expected tensors [E, ...], got none")
    like = tensors[0]
    check_index(who, index, like.device)
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise TypeError(f"{who}: tensors of {like.dtype} and {tensor.dtype} in one buffer")
        if tensor.device != like.device:
            raise ValueError(f"{who}: tensors on {like.device} and {tensor.device}")
        if tensor.shape[:1] != like.shape[:1]:
            raise ValueError(f"{who}: tensors of {list(like.shape[:1])} and {list(tensor.shape[:1])} experts")


def _grid(count: int, width: int) -> Callable[[Mapping[str, int]], int]:
    return lambda meta: count * -(-width // meta["BLOCK"])


@tuned(CONFIGS, key=["width"], varying=["first_count"])
def _pack_experts(
    first, second, index, out, first_count, width, first_stride, second_stride, out_stride, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + row)
    # Only one of the two loads reads memory.
    in_first = (c < width) & (expert < first_count)
    in_second = (c < width) & (expert >= first_count)
    one = tl.load(first + expert * first_stride + c, mask=in_first, other=0.0)
    other = tl.load(second + (expert - first_count) * second_stride + c, mask=in_second, other=0.0)
    values = tl.where(in_first, one, other)
    tl.store(out + row * out_stride + c, values.to(out.dtype.element_ty), mask=c < width)


@tuned(CONFIGS, key=["width"])
def _unpack_experts(packed, index, tensor, width, stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(packed + row * stride + c, mask=c < width, other=0.0)
    expert = tl.load(index + row)
    tl.store(tensor + expert * width + c, values, mask=c < width)
