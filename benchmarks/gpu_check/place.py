"""Where it is measured: on a GPU, or on a CPU that stands for one, to see that all of it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.case import SMALL, Sizes

# What a process ends with that can do nothing more, since a kernel has spoiled its state of the GPU.
SPOILED = 4


@dataclass(frozen=True)
class Shape:
    """A Qwen3-MoE with 0.6 billion parameters, of which 0.1 billion compute a token.

    Four layers: with more, compiling takes longer and a layer is no other.
    """

    layers: int = 4
    hidden: int = 1024
    inner: int = 768
    experts: int = 64
    choices: int = 8
    heads: int = 16
    key_heads: int = 4
    head_width: int = 64
    vocabulary: int = 16_384
    batch: int = 4
    length: int = 2048
    dtype: torch.dtype = torch.bfloat16


TINY = Shape(
    layers=1,
    hidden=32,
    inner=16,
    experts=8,
    choices=2,
    heads=2,
    key_heads=1,
    head_width=16,
    vocabulary=64,
    batch=2,
    length=16,
    dtype=torch.float32,
)


@dataclass(frozen=True)
class Place:
    """A device, the sizes of what is measured on it, and what compiles training steps there."""

    device: torch.device
    sizes: Sizes
    shape: Shape
    backend: str

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device is done."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Until the device is done with ``work``."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Between two events of the device."""
        if not self.is_gpu:
            return 1e3 * self.seconds(work)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def is_spoiled(self) -> bool:
        """Whether this process can use the device no more, as after a kernel that reads where it must not."""
        try:
            self.wait()
        except Exception:
            return True
        return False


GPU = Place(torch.device("cuda"), Sizes(), Shape(), "inductor")
PRETENDED = Place(torch.device("cpu"), SMALL, TINY, "aot_eager")
