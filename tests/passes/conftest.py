"""For tests that capture graphs with a plain torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_count_of_graphs() -> Iterator[None]:
    """Torch counts a function's graphs over all tests; Hecate, which is not compiled with here, does so per model."""
    torch._dynamo.reset()
    yield
