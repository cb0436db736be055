"""Numbers of the host in one tensor, and its parts."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.comm.collectives import joined, on_device_together, parts_of


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=6))
def test_parts_are_the_numbers_and_begin_at_16_bytes(lists: list[list[int]]) -> None:
    numbers = [*(np.array(one, dtype=np.int64) for one in lists), np.arange(6).reshape(2, 3), np.zeros((0, 4), int)]
    # As on a GPU. On a CPU nothing is put together.
    found = parts_of(torch.from_numpy(joined(numbers)), numbers)
    assert all(map(torch.equal, found, on_device_together(numbers, torch.device("cpu"))))
    assert [part.tolist() for part in found] == [part.tolist() for part in numbers]
    assert [part.shape for part in found] == [part.shape for part in numbers]
    assert len({part.untyped_storage().data_ptr() for part in found}) == 1
    assert all(part.storage_offset() * part.element_size() % 16 == 0 and part.is_contiguous() for part in found)
