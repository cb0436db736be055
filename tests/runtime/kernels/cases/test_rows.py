"""Kernels that move rows, against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hecate.runtime.kernels.gather_rows import gather_rows, gather_rows_reference
from hecate.runtime.kernels.scatter_rows import scatter_rows, scatter_rows_reference
from tests.runtime.kernels.device import DEVICE, DTYPES, MARKS, index_of, whole_numbers

pytestmark = MARKS
FEW = settings(max_examples=8, deadline=None)
SHAPES = [(5,), (6, 1), (7, 24), (3, 700), (4, 2, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", DTYPES)
def test_rows_leave_and_come_back_in_any_dtype(dtype: torch.dtype, wire: torch.dtype, launches: list[str]) -> None:
    rows, index = whole_numbers(9, 24, dtype=dtype), index_of(8, 0, 3, 5)
    there = gather_rows(rows, index, wire)
    assert there.dtype == wire and torch.equal(there, gather_rows_reference(rows, index, wire))
    back = scatter_rows(there, index, 9, dtype)
    assert back.dtype == dtype and torch.equal(back, scatter_rows_reference(there, index, 9, dtype))
    assert torch.equal(back[index], rows[index]) and not back[1].any()
    assert launches == ["gather_rows", "scatter_rows"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_any_shape(shape: tuple[int, ...], launches: list[str]) -> None:
    rows, count = whole_numbers(*shape), shape[0]
    index = torch.randperm(count).to(DEVICE)
    assert torch.equal(gather_rows(rows, index), rows[index])
    assert torch.equal(scatter_rows(rows, index, count)[index], rows)
    assert launches == ["gather_rows", "scatter_rows"]


def test_rows_with_gaps_in_memory() -> None:
    wide, index = whole_numbers(6, 40), index_of(5, 1)
    for rows in (wide[:, 3:20], wide[:, ::2], wide.t(), wide[:1].expand(6, 40)):
        assert torch.equal(gather_rows(rows, index), rows[index])
        assert torch.equal(scatter_rows(rows[:2], index, 6), scatter_rows_reference(rows[:2], index, 6, rows.dtype))


def test_rows_of_which_only_the_device_knows_the_number(launches: list[str]) -> None:
    rows, index = whole_numbers(9, 600), index_of(8, 0, 3, 5, 0, 0, 0)
    for used in (0, 3, 4, 7):
        found = gather_rows(rows, index, used=index_of(used))
        assert found.shape == (7, 600) and torch.equal(found[:used], rows[index[:used]])
    assert launches == ["gather_rows"] * 4


def test_no_rows(launches: list[str]) -> None:
    none = index_of()
    assert gather_rows(whole_numbers(3, 4), none).shape == (0, 4)
    assert gather_rows(whole_numbers(0, 4), none).shape == (0, 4)
    assert gather_rows(whole_numbers(3, 0), index_of(1, 1)).shape == (2, 0)
    assert not scatter_rows(whole_numbers(0, 4), none, 3).any()
    assert not launches


@FEW
@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 600))
def test_gather_rows(index: list[int], width: int) -> None:
    rows = whole_numbers(7, width, seed=width)
    assert torch.equal(gather_rows(rows, index_of(*index)), rows[index_of(*index)])


@FEW
@given(st.permutations(range(20)), st.integers(0, 20), st.integers(1, 600))
def test_scatter_rows(places: list[int], count: int, width: int) -> None:
    rows, index = whole_numbers(count, width, seed=width), index_of(*places[:count])
    assert torch.equal(scatter_rows(rows, index, 20), scatter_rows_reference(rows, index, 20, rows.dtype))
