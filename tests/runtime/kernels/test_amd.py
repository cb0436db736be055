"""What torch calls "cuda" may be a GPU of AMD: kernels compile for these, and nothing takes them for NVIDIA's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hecate.runtime.kernels import grouped_mm, launch
from hecate.runtime.ops import grouped_mm as operators


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    operators._is_capable.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    # As torch says it of an MI300.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))


def test_capabilities_are_of_nvidia(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 7)
    assert launch.nvidia_capability(gpu) is None and not operators._is_capable(gpu)
    operators._is_capable.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch.nvidia_capability(gpu) == (9, 4) and operators._is_capable(gpu)
    operators._is_capable.cache_clear()
    assert launch.nvidia_capability(torch.device("cpu")) is None


def test_products_take_no_tf32(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert grouped_mm.precision("tf32x3") == "ieee"
        monkeypatch.setattr(torch.version, "hip", None)
        assert grouped_mm.precision("tf32x3") == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class Amd:
    """What Triton asks of the driver before it compiles."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", "gfx942", 64)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_attention() -> None:
    from tests.runtime.kernels.test_compiled import compiled_attention

    torch.version.hip = "7.0"
    with pytest.MonkeyPatch.context() as patch:
        found = compiled_attention(64, 64, torch.bfloat16, Amd(), patch)
        assert len(found) == 3 and all("v_mfma" in made.asm["amdgcn"] for made in found.values())


@pytest.mark.skipif(launch.triton is None, reason="needs Triton, which is for Linux")
def test_attention_compiles(tmp_path: Path) -> None:
    """In a process of its own: what is compiled for whom is known when kernels are imported."""
    run = subprocess.run(
        [sys.executable, "-c", "from tests.runtime.kernels import test_amd; test_amd.compile_attention()"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
