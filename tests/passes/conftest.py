"""For all tests of passes."""

from __future__ import annotations

import pytest

from tests.support.graphs import GraphUnderTest


@pytest.fixture
def g() -> GraphUnderTest:
    """A graph to build by hand."""
    return GraphUnderTest()
