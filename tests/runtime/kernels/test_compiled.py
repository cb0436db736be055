"""Kernels compile for GPUs, as far as machine code. Triton brings what that takes, so no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from hecate.runtime.kernels import launch
from tests.support.extent import ALL

pytestmark = pytest.mark.skipif(launch.triton is None, reason="needs Triton, which is for Linux")

# Sizes of which 16 bytes hold a part, as those of models are.
SIZES = gpu_check.Sizes(tokens=32, choices=2, hidden=128, inner=64, owned=3, replicas=2)
CAPABILITIES = (80, 90, 100) if ALL else (90,)
MODULES = [
    module for module in vars(gpu_check).values() if isinstance(module, ModuleType) and hasattr(module, "tuned")
]
PRODUCTS = ("grouped_mm", "weight_grads")
INDICES = ("expand_segments", "split_rows")


class NoGpu:
    """What Triton asks of the driver before it compiles. Each capability is a device of its own."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", gpu_check.KERNELS)
def test_a_kernel_compiles(name: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In each dtype; with each configuration that is tried if HECATE_TESTS=all. Rows and tiles move by 16 bytes."""
    found: list[tuple[torch.dtype, Any]] = []

    def compile_only(kernel: Any, grid: Any, device: torch.device, *args: Any, **constants: Any) -> None:
        # As the tuner calls it.
        kernel.nargs = dict(zip(kernel.arg_names, args, strict=False))
        for config in kernel.prune_configs(constants)[: None if ALL else 1]:
            made = kernel.fn.warmup(*args, grid=(1,), **constants, **config.all_kwargs())
            found.append((args[0].dtype, made))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("triton.runtime.driver._active", NoGpu(capability))
    for module in MODULES:
        monkeypatch.setattr(module, "launch", compile_only)
        if hasattr(module, "runs_on"):
            monkeypatch.setattr(module, "runs_on", lambda _: True)
    monkeypatch.setattr("hecate.runtime.kernels.grouped_mm.runs_on", lambda _: True)
    for case in gpu_check.cases_of(name, SIZES, torch.device("cpu")):
        case.ours()
    assert {dtype for dtype, _ in found} >= ({torch.float32} if name == "sum_replicas" else set(dtypes_of(name)))
    for dtype, made in found:
        text = made.asm["ptx"]
        assert made.asm["cubin"]
        if name in PRODUCTS:
            assert "cp.async.cg.shared.global" in text, "16 bytes, while the tile before is multiplied"
            assert dtype is torch.float32 or "mma" in text, "tensor cores"
        elif name not in INDICES:
            assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    # Rows come back in the dtype that travels.
    return (torch.bfloat16, torch.float16) if name == "scatter_rows" else tuple(gpu_check.KERNELS[name][1])
