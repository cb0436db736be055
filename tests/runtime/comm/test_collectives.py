"""Numbers of the host in one tensor, and its parts; on devices of other kinds than GPUs of CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.comm.collectives import joined, on_device, on_device_together, on_host, parts_of


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


def test_a_device_of_any_kind_is_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for one of another maker."""
    # Without a device there is nothing to pin memory for.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    there = on_device(np.arange(3), torch.device("meta"))
    assert there.is_meta
    with pytest.raises(NotImplementedError, match="copy out of meta tensor"):
        on_host(there)
    here = torch.arange(3)
    assert on_host(here) is here
