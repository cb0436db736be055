"""What a case is, and what operands are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


# What a kernel and its reference may differ by, relative to the largest value. Rows that only move must be equal.
EQUAL: dict[torch.dtype, float] = dict.fromkeys(DTYPES, 0.0)
SUMS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Sizes:
    """Of one layer on one rank; by default about those of Qwen3-30B-A3B on eight ranks."""

    tokens: int = 8192
    choices: int = 8
    hidden: int = 2048
    inner: int = 768
    owned: int = 16
    replicas: int = 4
    ranks: int = 64
    heads: int = 32
    head_width: int = 128
    context: int = 4096
    block: int = 64


SMALL = Sizes(
    tokens=24,
    choices=3,
    hidden=40,
    inner=24,
    owned=3,
    replicas=2,
    ranks=6,
    heads=4,
    head_width=16,
    context=50,
    block=8,
)


@dataclass(frozen=True)
class Case:
    """One kernel on one dtype.

    Attributes:
        ours, reference: each computes the result anew.
        torch: what torch itself has for it, if that is something else.
        same: whether that computes the same, and is compared with the reference, too.
        limits: see :data:`SUMS`.
        note: which case of this dtype it is, if there are several.
        timed: what is timed of kernel and reference, if that is less than computing the result anew.
        bytes: what any such kernel must read and write.
        flops: two for each multiply-add.
        bound: what the GPU can do at best in the same time, if not a copy of so many bytes. Of attention torch's own
            computes another number of scores, so there is none.
        most_ms: what it may take, if there is such a promise.
    """

    dtype: torch.dtype
    ours: Callable[[], Any]
    reference: Callable[[], Any]
    torch: Callable[[], Any] | None
    limits: dict[torch.dtype, float]
    note: str = ""
    timed: tuple[Callable[[], Any], Callable[[], Any]] | None = None
    bytes: int = 0
    flops: int = 0
    bound: Callable[[], Any] | None = None
    most_ms: float = 0.0
    same: bool = False


class Maker:
    """Makes operands on a device, the same in every run."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self._generator = torch.Generator(device).manual_seed(0)

    @property
    def rows(self) -> int:
        return self.sizes.tokens * self.sizes.choices

    def numbers(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device).to(dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)

    def offsets(self) -> Tensor:
        """Ends of slots: some have many rows, one has none, and a few rows are behind the last."""
        slots = self.sizes.owned + self.sizes.replicas
        shares = torch.rand(slots, generator=self._generator, device=self.device) ** 2
        shares[1] = 0
        sizes = (shares / shares.sum() * (self.rows - self.sizes.choices)).to(torch.int64)
        return sizes.cumsum(0).to(torch.int32)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
