"""Which ranks share a node."""

from __future__ import annotations

import pytest

from hecate.runtime.comm.world import SINGLE, World, find_topology
from hecate.runtime.placement.topology import Topology
from tests.support.threads import on_threads


@pytest.mark.parametrize(
    ("local", "nodes"), [(None, (0, 0, 0)), ("3", (0, 0, 0)), ("2", (0, 0, 1)), ("1", (0, 1, 2))]
)
def test_nodes_are_what_torchrun_started_together(
    local: str | None, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)

    def check(world: World) -> None:
        assert find_topology(None, world) == Topology(nodes)

    on_threads(check)


def test_a_given_topology_must_fit() -> None:
    assert find_topology(Topology((0,)), SINGLE) == Topology((0,))
    with pytest.raises(ValueError, match=r"topology has 2 ranks, the process group has 1"):
        find_topology(Topology((0, 1)), SINGLE)
    assert find_topology(None, SINGLE) == Topology((0,))
