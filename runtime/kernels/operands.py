"""Operands of kernels: their layouts, and checks."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Dtypes that kernels load and store. Sums are in float32.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def flat_rows(rows: Tensor) -> Tensor:
    """Return ``[R, ...]`` as ``[R, width]``, each row in one piece; a copy only if memory has gaps inside rows."""
    flat = rows.reshape(rows.shape[0], rows.shape[1:].numel())
    return flat if flat.shape[1] < 2 or flat.stride(1) == 1 else flat.contiguous()


def room_for(who: str, shape: Sequence[int], dtype: torch.dtype | None, like: Tensor, out: Tensor | None) -> Tensor:
    """Return ``out``, if it is contiguous and of ``shape`` on the device of ``like``; a new tensor if it is None.

    ``dtype`` None allows any of ``out``, and is that of ``like`` for a new tensor. Raises ValueError.
    """
    if out is None:
        return torch.empty(shape, dtype=like.dtype if dtype is None else dtype, device=like.device)
    if list(out.shape) != list(shape) or dtype not in (None, out.dtype):
        raise ValueError(
            f"{who}: expected {list(shape)} of {dtype} to write into, got {list(out.shape)}, {out.dtype}"
        )
    if out.device != like.device or not out.is_contiguous():
        raise ValueError(f"{who}: writes into contiguous tensors on {like.device} only")
    return out


def check_rows(who: str, rows: Tensor) -> None:
    """Raise ValueError unless ``rows`` is ``[R, ...]``."""
    if rows.dim() == 0:
        raise ValueError(f"{who}: expected rows [R, ...], got a tensor without dimensions")


def check_alike(who: str, *tensors: Tensor) -> None:
    """Raise TypeError unless tensors have one dtype, and ValueError unless they are on one device."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise TypeError(f"{who}: dtypes differ: {', '.join(str(tensor.dtype) for tensor in tensors)}")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"{who}: devices differ: {', '.join(str(tensor.device) for tensor in tensors)}")


def check_turned(who: str, rows: Tensor, turned: Tensor) -> None:
    """Raise TypeError unless both are int64, and ValueError unless ``[A, B]`` and ``[B, A]`` on one device."""
    if rows.dim() != 2 or turned.shape != rows.shape[::-1]:
        raise ValueError(f"{who}: expected [A, B] and [B, A], got {list(rows.shape)}, {list(turned.shape)}")
    if not rows.dtype == turned.dtype == torch.int64:
        raise TypeError(f"{who}: expected numbers of int64, got {rows.dtype}, {turned.dtype}")
    if rows.device != turned.device:
        raise ValueError(f"{who}: the first are on {rows.device}, the second on {turned.device}")


def check_index(who: str, index: Tensor, device: torch.device, length: int | None = None) -> None:
    """Raise TypeError unless ``index`` is int64, and ValueError unless it is ``[length]`` on ``device``."""
    if index.dtype != torch.int64:
        raise TypeError(f"{who}: expected an index of int64, got {index.dtype}")
    if index.dim() != 1:
        raise ValueError(f"{who}: expected an index [n], got {list(index.shape)}")
    if index.device != device:
        raise ValueError(f"{who}: the index is on {index.device}, the rows are on {device}")
    if length is not None and index.shape[0] != length:
        raise ValueError(f"{who}: {length} rows, but an index of {index.shape[0]}")
