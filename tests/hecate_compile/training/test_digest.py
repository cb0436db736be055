"""Digests of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hecate.training import digest as under_test
from hecate.training.digest import digest, has_digest


def _some(dtype: torch.dtype, width: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, width, dtype=torch.float64, generator=generator) * 50
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("width", [5, 8])
def test_parts_add_up(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = _some(dtype, width)
    whole = digest(tensor)
    assert torch.equal(digest(tensor[:2]) + digest(tensor[2:], 2 * width), whole)
    assert torch.equal(digest(tensor.t().contiguous().t()), whole)
    # Wherever it is in memory.
    moved = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view_as(tensor)
    assert torch.equal(digest(moved), whole)
    monkeypatch.setattr(under_test, "_AT_A_TIME", 7)
    assert torch.equal(digest(tensor), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_every_change_is_seen(dtype: torch.dtype) -> None:
    tensor = _some(dtype)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    others = [-tensor, tensor.flip(0), tensor.flip(1), tensor.t(), tensor + 1, (~tensor.view(bits)).view(dtype)]
    one = tensor.clone()
    one.view(bits)[0, 0] = ~one.view(bits)[0, 0]
    others.append(one)
    for bit in range(8 * tensor.element_size()):
        other = tensor.clone()
        other.view(bits)[3, 2] ^= torch.ones((), dtype=bits) << bit
        others.append(other)
    digests = [int(digest(one)) for one in (tensor, *others)]
    assert len({*digests}) == len(digests)


def test_what_has_none() -> None:
    assert has_digest(torch.zeros(0)) and int(digest(torch.zeros(0))) == 0
    assert not any(map(has_digest, (1.0, None, torch.zeros(2, device="meta"), torch.eye(2).to_sparse())))
