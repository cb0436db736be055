"""What computes on slots equals its reference, in loops and by torch's own kernel."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hecate.runtime.ops import grouped_mm
from tests.support import reference


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm(dtype: torch.dtype, transposed: bool) -> None:
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    x = torch.randn(9, 4).to(dtype).requires_grad_()
    stored = torch.randn(3, 5, 4) if transposed else torch.randn(3, 4, 5)
    w = stored.to(dtype).requires_grad_()
    used = w.transpose(1, 2) if transposed else w
    out = torch.ops.hecate.grouped_mm(x, used, offs)
    expected = reference.grouped_mm(x, used, offs)
    torch.testing.assert_close(out, expected)
    assert not out[7:].any(), "padding rows are zero"
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, w), grad)
    theirs = torch.autograd.grad(expected, (x, w), grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert not ours[1][1].any(), "an expert without rows gets a zero gradient"
    assert ours[1].stride() == w.stride(), "the gradient lies in memory like the weight"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("owned", "replicas"), [(3, 0), (2, 1), (1, 2), (0, 3)])
def test_grouped_mm_of_own_experts_and_replicas(
    owned: int, replicas: int, dtype: torch.dtype, transposed: bool
) -> None:
    """Bit for bit one grouped matmul over both, and close to the reference."""
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    x = torch.randn(9, 4).to(dtype).requires_grad_()
    stored = torch.randn(3, 5, 4) if transposed else torch.randn(3, 4, 5)
    both = stored.to(dtype).requires_grad_()
    own, more = (part.detach().clone().requires_grad_() for part in both.split([owned, replicas]))
    used, first, second = (w.transpose(1, 2) if transposed else w for w in (both, own, more))
    out = torch.ops.hecate.grouped_mm_pair(x, first, second, offs)
    torch.testing.assert_close(out, reference.grouped_mm_pair(x, first, second, offs))
    expected = torch.ops.hecate.grouped_mm(x, used, offs)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, own, more), grad)
    theirs = torch.autograd.grad(expected, (x, both), grad)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(torch.cat(ours[1:]), theirs[1])
    assert ours[1].stride() == own.stride() and ours[2].stride() == more.stride()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("owned", "replicas"), [(4, 0), (2, 2), (0, 4)])
def test_products_by_torchs_grouped_kernel(
    owned: int, replicas: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on GPUs in bf16, here with torch's own implementation for CPUs: slots without rows, and padding."""
    offs = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    x = torch.randn(12, 8, dtype=torch.bfloat16)
    stored = torch.randn(4, 16, 8) if transposed else torch.randn(4, 8, 16)
    w = stored.to(torch.bfloat16).transpose(1, 2) if transposed else stored.to(torch.bfloat16)
    own, more = w[:owned], w[owned:]
    grad = torch.randn(12, 16, dtype=torch.bfloat16)
    ops = torch.ops.hecate
    loops = (
        ops.grouped_mm_pair(x, own, more, offs),
        *ops.grouped_mm_pair_weight_grad(x, grad, offs, owned, replicas, transposed),
    )
    calls = []
    kernel = torch._grouped_mm
    monkeypatch.setattr(grouped_mm, "_has_kernel", lambda _: True)
    monkeypatch.setattr(
        "hecate.runtime.ops.grouped_mm.grouped_mm_of_torch",
        lambda *args, **given: calls.append(args) or kernel(*args, **given),
    )
    natives = (
        ops.grouped_mm_pair(x, own, more, offs),
        *ops.grouped_mm_pair_weight_grad(x, grad, offs, owned, replicas, transposed),
    )
    assert len(calls) == 2, "one kernel for the products, one for their weight gradients"
    for native, loop in zip(natives, loops, strict=True):
        assert native.shape == loop.shape
        torch.testing.assert_close(native, loop, rtol=2e-2, atol=2e-2)
    assert not natives[0][9:].any(), "padding rows are zero"
    whole = torch.cat(natives[1:])
    assert not whole[0].any() and not whole[2].any(), "slots without rows have a zero gradient"
    assert natives[1].stride() == loops[1].stride() or not owned


def test_who_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own kernel where it takes the operands as they are, else Hecate's, else a loop."""
    offs, x = torch.tensor([2, 5], dtype=torch.int32), torch.zeros(5, 8)
    w, narrow = torch.zeros(2, 8, 16), torch.zeros(2, 8, 3)
    cases = {
        "bf16": (x.bfloat16(), [w.bfloat16()]),
        "pair": (x.bfloat16(), [w.bfloat16(), w.bfloat16()]),
        "unaligned": (x.bfloat16(), [narrow.bfloat16()]),
        "fp32": (x, [w]),
        "fp16": (x.half(), [w.half()]),
        "fp64": (x.double(), [w.double()]),
    }

    def choices() -> dict[str, str]:
        return {name: grouped_mm._choose(rows, others, offs) for name, (rows, others) in cases.items()}

    assert set(choices().values()) == {"loop"}
    monkeypatch.setattr(grouped_mm, "_has_kernel", lambda _: True)
    without_triton = dict.fromkeys(cases, "loop") | {"bf16": "torch", "pair": "torch"}
    assert choices() == without_triton
    monkeypatch.setattr("hecate.runtime.kernels.grouped_mm.runs_on", lambda _: True)
    assert choices() == dict.fromkeys(cases, "kernel") | {"bf16": "torch", "fp64": "loop"}


def test_torchs_kernel_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (8, 0), 1: (9, 0), 2: (10, 3), 3: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(grouped_mm, "_is_capable", grouped_mm._is_capable.__wrapped__)

    class OnCuda:
        is_cuda = True

        def __init__(self, index: int) -> None:
            self.device = torch.device("cuda", index)

    assert [grouped_mm._has_kernel(OnCuda(index)) for index in range(4)] == [False, True, True, False]
    assert not grouped_mm._has_kernel(torch.zeros(1))


def test_torchs_kernel_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and matrices at multiples of 16 bytes, with strides that are such, and not a copy more."""
    given, kernel = [], torch._grouped_mm

    def checked(*operands: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        for operand in operands:
            assert operand.data_ptr() % 16 == 0 and 1 in operand.stride()[-2:]
            assert all(stride == 1 or stride * 2 % 16 == 0 for stride in operand.stride())
            given.append(operand.data_ptr())
        return kernel(*operands, offs=offs)

    monkeypatch.setattr(grouped_mm, "_has_kernel", lambda _: True)
    monkeypatch.setattr("hecate.runtime.ops.grouped_mm.grouped_mm_of_torch", checked)
    ops, offs = torch.ops.hecate, torch.tensor([2, 5], dtype=torch.int32)
    buffer = torch.randn(400).bfloat16()
    x, w, grad = torch.randn(5, 8).bfloat16(), torch.randn(2, 8, 16).bfloat16(), torch.randn(5, 16).bfloat16()
    expected = ops.grouped_mm(x, w, offs), ops.grouped_mm_weight_grad(x, grad, offs, False)
    assert given == [x.data_ptr(), w.data_ptr(), x.data_ptr(), grad.data_ptr()]
    shifted = [buffer[1 : 1 + x.numel()].view(x.shape), buffer[101 : 101 + grad.numel()].view(grad.shape)]
    gaps = torch.zeros(2, 8, 17, dtype=torch.bfloat16)[..., :16]
    for to, source in ((shifted[0], x), (shifted[1], grad), (gaps, w)):
        to.copy_(source)
    found = ops.grouped_mm(shifted[0], gaps, offs), ops.grouped_mm_weight_grad(*shifted, offs, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_grouped_mm_without_rows_or_slots() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert torch.ops.hecate.grouped_mm(torch.zeros(0, 4), torch.zeros(0, 4, 5), none).shape == (0, 5)
    offs = torch.zeros(3, dtype=torch.int32)
    assert torch.ops.hecate.grouped_mm(torch.zeros(0, 4), torch.randn(3, 4, 5), offs).shape == (0, 5)
    grad = torch.ops.hecate.grouped_mm_weight_grad(torch.zeros(0, 4), torch.zeros(0, 5), offs, False)
    assert grad.shape == (3, 4, 5) and not grad.any()


def test_flops_count_all_rows() -> None:
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.ops.hecate.grouped_mm(x, w, torch.tensor([2, 6])).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 5
    own, replicas = (part.detach().requires_grad_() for part in w.split([1, 1]))
    with FlopCounterMode(display=False) as counter:
        torch.ops.hecate.grouped_mm_pair(x, own, replicas, torch.tensor([2, 6])).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 5


def test_row_slots_and_offsets() -> None:
    offs = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    for ends in (offs, offs[:0]):
        assert torch.equal(torch.ops.hecate.row_slots(ends, 7), reference.row_slots(ends, 7))
    assert torch.ops.hecate.row_slots(offs, 7).tolist()[5:] == [4, 4], "behind the last slot"
    assert torch.ops.hecate.sizes_to_offsets([0, 3, 0, 2], offs).tolist() == offs.tolist()
