"""Digests of tensors: numbers that change with any bit, and can be added up over parts that ranks have."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.private import is_traceable_wrapper_subclass

# Elements that are taken at a time: their digests are eight bytes each.
_AT_A_TIME = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_digest(value: object) -> bool:
    """Return whether ``value`` is a tensor whose elements are its own, and in memory."""
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return False
    return value.layout == torch.strided and value.device.type != "meta"


def digest(tensor: Tensor, start: int = 0) -> Tensor:
    """Return an int64 scalar that changes with the bits of a tensor's elements, and with their order.

    That of a whole is the sum (modulo 2**64) of those of runs of its rows, of which each says at which element it has
    its ``start``.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    size, row = flat.element_size(), tensor.shape[1:].numel() * flat.element_size()
    # Eight bytes at a time where rows are whole numbers of them, so that every run begins with eight of its own.
    unit = 8 if row and row % 8 == 0 else min(size, 8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.storage_offset() * flat.element_size() % unit:
        flat = flat.clone()
    bits, first = flat.view(_BITS[unit]), start * size // unit
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for at in range(0, len(bits), _AT_A_TIME):
        some = bits[at : at + _AT_A_TIME].to(torch.int64)
        places = torch.arange(first + at, first + at + len(some), device=tensor.device)
        # An odd factor loses no bit, but of the highest it keeps only whether there are odd many: the upper half is
        # brought down to the lower one, too.
        total += ((some ^ ((some >> 32) & 0xFFFFFFFF)) * (2 * places + 1)).sum()
    return total
