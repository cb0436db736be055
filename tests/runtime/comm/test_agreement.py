"""Differences between ranks are named on every rank."""

from __future__ import annotations

import pytest

from hecate.runtime.comm.agreement import DisagreementError, agree
from hecate.runtime.comm.world import SINGLE, World
from tests.support.threads import on_each_rank, on_threads


def test_equal_lines_pass() -> None:
    on_threads(lambda world: agree(["a", "b"], "the test", "advice", world))
    agree(["anything"], "the test", "advice", SINGLE)


@pytest.mark.parametrize(
    ("odd", "named"),
    [(["a", "x"], "rank 1, line 1: x"), (["a"], "rank 1, line 1: (nothing)"), ([], "rank 1, line 0:")],
)
@on_each_rank
def test_difference_is_named_on_all_ranks(odd: list[str], named: str, world: World) -> None:
    lines = odd if world.rank == 1 else ["a", "b"]
    with pytest.raises(DisagreementError) as caught:
        agree(lines, "the test", "Do this.", world)
    assert named in str(caught.value)
    assert "rank 0, line" in str(caught.value)
    assert str(caught.value).endswith("Do this.")


def test_ranks_that_do_not_know_are_not_asked() -> None:
    on_threads(lambda world: agree(None if world.rank == 1 else ["a"], "the test", "advice", world))
    on_threads(lambda world: agree(None, "the test", "advice", world))
    agree(["anything"], "the test", "advice", SINGLE)

    def check(world: World) -> None:
        lines = [None, ["a", "b"], ["a", "c"]][world.rank]
        with pytest.raises(DisagreementError, match=r"rank 0, line 0: \(not known\)"):
            agree(lines, "the test", "Do this.", world)

    on_threads(check)
