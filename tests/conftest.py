"""For all tests."""

from __future__ import annotations

import gc
import os

# Before anything computes: a test uses one core, so that two of them do not get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tables are as wide as the terminal, which is another one for every reader of these tests.
os.environ["COLUMNS"] = "150"

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch._dynamo.pgo


def pytest_collection_finish() -> None:
    """Tracing makes millions of objects that live on; looking for garbage among them takes a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sizes that torch saw change in one test are not dynamic in the next, nor is a failing test's grad mode kept."""
    torch._dynamo.pgo.reset_code_state()
    # Torch counts the graphs of a function over all tests; Hecate does so per model.
    with torch._dynamo.config.patch(recompile_limit=1000) if _captures(request.path) else nullcontext():
        yield
    torch.set_grad_enabled(True)


def _captures(path: Path) -> bool:
    """Tell whether tests capture graphs with a plain torch.compile."""
    return path.relative_to(Path(__file__).parent).parts[0] in ("passes", "runtime")
