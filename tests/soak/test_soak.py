"""A few cycles of the soak test: one at each of the places where most could go wrong."""

from __future__ import annotations

import pytest

from tests.soak.cycle import Soak
from tests.soak.kill import Kill

KILLS = (
    Kill("step", 6, 1, "me"),
    Kill("half a manifest", 2, 0, "all ranks"),
    Kill("before the rename", 1, 0, "agent"),
    Kill("moving", 3, 1, "rank 0"),
    Kill("background", 1, 0, "everything", 0.01),
)


@pytest.mark.distributed
def test_nothing_is_lost() -> None:
    with Soak(seed=1, steps=8) as soak:
        for kill in KILLS:
            soak.cycle(kill)
        assert not soak.summary.problems, soak.summary.text()
        assert soak.summary.struck >= len(KILLS) - 1, soak.summary.text()
        assert soak.summary.saved > 5 and soak.summary.loads >= len(KILLS)
