"""Kernels that pack experts and add up their gradients, against their references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hecate.runtime.kernels.pack_experts import (
    pack_experts,
    pack_experts_reference,
    unpack_experts,
    unpack_experts_reference,
)
from hecate.runtime.kernels.sum_replicas import sum_replicas, sum_replicas_reference
from tests.runtime.kernels.device import DEVICE, DTYPES, MARKS, index_of, whole_numbers

pytestmark = MARKS
FEW = settings(max_examples=8, deadline=None)
SHAPES = [(3, 5), (7,), (2, 2, 3), ()]


def tensors_of(experts: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Matrices, biases, something else, and one number, of each expert."""
    return [whole_numbers(experts, *shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", DTYPES)
def test_pack_experts(dtype: torch.dtype, wire: torch.dtype, launches: list[str]) -> None:
    tensors, index = tensors_of(4, dtype), index_of(3, 0, 3)
    packed = pack_experts(tensors, index, dtype=wire)
    assert packed.dtype == wire and packed.shape == (3, 15 + 7 + 12 + 1)
    assert torch.equal(packed, pack_experts_reference(tensors, index, (), wire))
    assert launches == ["pack_experts"] * 4


@pytest.mark.parametrize(("first", "second"), [(2, 3), (0, 4), (4, 0)])
def test_pack_experts_of_two_kinds(first: int, second: int) -> None:
    tensors, behind = tensors_of(first), tensors_of(second, seed=9)
    both = [torch.cat(pair) for pair in zip(tensors, behind, strict=True)]
    index = index_of(*range(first + second), 0, first + second - 1)
    expected = torch.cat([tensor[index].reshape(len(index), -1) for tensor in both], dim=1)
    assert torch.equal(pack_experts(tensors, index, behind=behind), expected)
    assert torch.equal(pack_experts_reference(tensors, index, behind, torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_experts(dtype: torch.dtype, launches: list[str]) -> None:
    packed, index = whole_numbers(2, 35, dtype=dtype), index_of(3, 1)
    found, expected = tensors_of(4, dtype), tensors_of(4, dtype)
    unpack_experts(packed, found, index)
    unpack_experts_reference(packed, expected, index)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(pack_experts(found, index), packed)
    assert launches == ["pack_experts"] * 8


def test_no_experts(launches: list[str]) -> None:
    assert pack_experts(tensors_of(3), index_of()).shape == (0, 35)
    unpack_experts(whole_numbers(0, 35), tensors_of(3), index_of())
    sum_replicas(whole_numbers(2, 3), whole_numbers(0, 3), index_of(0, 0, 0), index_of())
    assert not launches


def csr(slots: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and order of parts that are for ``slots``."""
    order = np.argsort(np.array(slots, dtype=np.int64), kind="stable")
    starts = np.concatenate([[0], np.bincount(np.array(slots, dtype=np.int64), minlength=count).cumsum()])
    return index_of(*starts.tolist()), index_of(*order.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_replicas(dtype: torch.dtype, launches: list[str]) -> None:
    """Parts with gaps between their rows, as they come packed."""
    packed = whole_numbers(4, 30, dtype=dtype)
    starts, order = csr([2, 0, 2, 2], 4)
    found, expected = whole_numbers(4, 5, 3, seed=1), whole_numbers(4, 5, 3, seed=1)
    sum_replicas(found, packed[:, 6:21], starts, order)
    sum_replicas_reference(expected, packed[:, 6:21], starts, order)
    assert torch.equal(found, expected)
    assert torch.equal(found[[1, 3]], whole_numbers(4, 5, 3, seed=1)[[1, 3]])
    assert launches == ["sum_replicas"]


@FEW
@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 40), st.integers(0, 2**16))
def test_sums_are_in_the_given_order(slots: list[int], width: int, seed: int) -> None:
    """Bit for bit, with numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    totals, parts = (torch.randn(n, width, generator=generator).to(DEVICE) for n in (5, len(slots)))
    starts, order = csr(slots, 5)
    expected = totals.clone()
    for part, slot in zip(parts, slots, strict=True):
        expected[slot] += part
    by_reference = totals.clone()
    sum_replicas_reference(by_reference, parts, starts, order)
    sum_replicas(totals, parts, starts, order)
    assert torch.equal(totals, expected) and torch.equal(by_reference, expected)
