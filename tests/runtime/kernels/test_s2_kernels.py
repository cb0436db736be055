"""The Triton kernels of S2-Attention against dense attention: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.attention.test_s2_attention import CASES, Case, cases, errors, expected, inputs, inputs_of
from tests.support.extent import ALL

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")
# The interpreter runs one program after another.
FEW = ("shared keys", "shorter than a block", "blocks of several tiles")

# How far from dense attention in float64 the worst number may be.
BARS = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def through_kernels(case: Case, device: str, dtype: torch.dtype) -> float:
    """The worst error of the output and the gradients."""
    from hecate.runtime.attention.s2_backward import backward
    from hecate.runtime.attention.s2_forward import forward

    qkv, grad, p = inputs_of(case, dtype)
    q, k, v = (x.to(device) for x in qkv)
    out, lse = forward(q, k, v, p, 0.3)
    found = [out, *backward(grad.to(device), q, k, v, out, lse, p, 0.3)]
    return max(errors([x.cpu() for x in found], expected(qkv, grad, p)))


@settings(max_examples=40 if ALL else 3, deadline=None, derandomize=True)
@given(cases(widths=(16, 24, 64, 128), longest=70), st.sampled_from(list(BARS)))
def drawn(case: Case, dtype: torch.dtype) -> None:
    assert through_kernels(case, "cpu", dtype) < BARS[dtype]


def multiply_bfloat16() -> None:
    """Let Triton's interpreter multiply bfloat16, which it keeps as the whole number with the same bits."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def wide(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
        found: TensorHandle = plain(self, wide(a), wide(b), *others)
        return found

    InterpreterBuilder.create_dot = create_dot


def main() -> None:
    multiply_bfloat16()
    for name in CASES if ALL else FEW:
        for dtype in BARS if ALL else list(BARS)[:1]:
            error = through_kernels(CASES[name], "cpu", dtype)
            assert error < BARS[dtype], (name, dtype, error)
            print(f"{name}, {dtype}: {error:.1e}", flush=True)
    drawn()
    print("drawn")


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """In a process of its own: whether Triton interprets is read when it is imported."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.test_s2_kernels"],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "drawn"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    assert through_kernels(CASES[name], "cuda", torch.float32) < 1e-5
    assert through_kernels(CASES[name], "cuda", torch.bfloat16) < BARS[torch.bfloat16]
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
