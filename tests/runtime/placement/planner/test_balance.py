"""The steps of balancing in whole rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import local_split
from hecate.runtime.placement.planner.balance import _split_anew, cut_at, local_ends
from tests.runtime.placement.planner.cases import FAST, Case, cases, placements


@FAST
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=2, max_size=7))
def test_water_finds_its_level(holders: list[tuple[int, int]]) -> None:
    """With two holders, which have a formula of their own, as with more."""
    heights, quota = [height for height, _ in holders], [count for _, count in holders]
    level = [height + count for height, count in holders]
    _split_anew(sum(quota), tuple(range(len(holders))), quota, level)
    assert level == [height + count for height, count in zip(heights, quota, strict=True)]
    assert sum(quota) == sum(count for _, count in holders) and min(quota) >= 0
    surface = min(level)
    assert all(count == 0 for height, count in zip(heights, quota, strict=True) if height > surface)
    # A row more for the first of those that are covered, and for nobody else.
    more = [found - surface for found, height in zip(level, heights, strict=True) if height <= surface]
    assert more == sorted(more, reverse=True) and set(more) <= {0, 1} and 0 in more


@FAST
@given(cases().flatmap(lambda case: st.tuples(st.just(case), placements(case))))
def test_the_first_split_is_the_nearest_in_whole_rows(drawn: tuple[Case, Placement]) -> None:
    case, placement = drawn
    rows = case.load.tolist()
    exact = local_split(rows, placement, case.topology)
    for total, ranks, parts in zip(rows, placement.holders, exact, strict=True):
        found = cut_at(total, local_ends(ranks, case.topology))
        assert sum(found) == total
        assert all(abs(count - part) < 1 + 1e-6 for count, part in zip(found, parts, strict=True))


def test_many_rows_are_cut_into_all_that_there_are() -> None:
    """Where a device still computes in int64."""
    total = 2**31 - 1
    parts = cut_at(total, [-(-(end << 32) // 3) for end in (1, 2, 3)])
    assert sum(parts) == total and max(parts) - min(parts) <= 1
