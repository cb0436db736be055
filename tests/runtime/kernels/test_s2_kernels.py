"""The Triton kernels of S2-Attention against dense attention: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.runtime.ops.test_s2_attention import CASES, errors, expected, inputs

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")
# Short ones: the interpreter runs one program after another.
NAMES = (
    "whole blocks", "no multiple of the block", "shared keys", "a pattern for each query head", "an offset",
    "narrow values", "only local blocks", "shorter than a block",
)  # fmt: skip


def through_kernels(name: str, device: str, dtype: torch.dtype = torch.float32) -> float:
    """The worst error of the output and the gradients."""
    from hecate.runtime.kernels.s2_backward import backward
    from hecate.runtime.kernels.s2_forward import forward

    qkv, grad, p = inputs(name, dtype)
    q, k, v = (x.to(device) for x in qkv)
    out, lse = forward(q, k, v, p, 0.3)
    found = [out, *backward(grad.to(device), q, k, v, out, lse, p, 0.3)]
    return max(errors([x.cpu() for x in found], expected(qkv, grad, p)))


def main() -> None:
    for name in NAMES:
        print(f"{name}: {through_kernels(name, 'cpu'):.1e}", flush=True)


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """In a process of its own: whether Triton interprets is read when it is imported."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.test_s2_kernels"], capture_output=True, text=True, timeout=500,
        cwd=Path(__file__).parents[3], env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = {line.rpartition(": ")[0]: float(line.rpartition(": ")[2]) for line in run.stdout.splitlines()}
    assert set(found) == set(NAMES)
    assert max(found.values()) < 3e-6, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    assert through_kernels(name, "cuda") < 1e-5
    assert through_kernels(name, "cuda", torch.bfloat16) < 2e-2
    # Equal inputs give equal gradients.
    qkv, grad, p = inputs(name)
    q, k, v = (x.cuda().requires_grad_() for x in qkv)
    runs = []
    for _ in range(2):
        out, _lse = torch.ops.hecate.s2_attention(q, k, v, None, p.numbers, 0.3)
        runs.append(torch.autograd.grad(out, (q, k, v), grad.cuda()))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


if __name__ == "__main__":
    main()
