"""Which ranks share a node."""

from __future__ import annotations

import pytest
import torch

from hecate.runtime.comm.world import SINGLE, World, backend_for, find_topology
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


def test_ranks_that_share_a_gpu_talk_over_gloo_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert backend_for(torch.device("cpu")) is None
    assert backend_for(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"4 ranks on 2 GPU\(s\).*--nproc-per-node=2"):
        assert backend_for(torch.device("cuda", 1)) == "gloo"
