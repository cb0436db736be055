"""Groups of ranks; whole models in them are in tests/hecate_compile/groups."""

from __future__ import annotations

import pytest

from hecate.runtime.comm.mesh import best_group


@pytest.mark.parametrize(
    ("ranks", "experts", "best"),
    [(256, 128, 64), (256, None, 64), (16, 8, 8), (24, 128, 24), (12, 5, 4), (1, 1, 1), (128, 6, 4)],
)
def test_a_group_is_of_whole_nodes_or_inside_one_with_an_expert_for_each_rank(
    ranks: int, experts: int | None, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert best_group(ranks, experts) == best
