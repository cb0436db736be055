"""Numbers of the host in one tensor, and sums over ranks that cross to another node as seldom as can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hecate.runtime.comm import collectives
from hecate.runtime.comm.collectives import joined, on_device, on_device_together, on_host, parts_of
from hecate.runtime.comm.world import World
from hecate.runtime.placement.topology import Topology
from tests.support.threads import on_threads

NODES = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3), (0, 0, 1, 1, 2, 2), (0, 0, 0, 1), (0, 0, 0), (0,)]


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


def _values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    # Whole numbers, so that no order of sums rounds.
    return torch.arange(length, dtype=dtype) % 7 + rank


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_sum(nodes: tuple[int, ...], dtype: torch.dtype) -> None:
    def check(world: World) -> None:
        for length in (0, 1, 5, 24, 101):
            mine = _values(world.rank, length, dtype)
            collectives.all_reduce_by_nodes(mine, Topology(nodes), world)
            want = sum(_values(rank, length, torch.float32) for rank in range(world.size))
            assert torch.equal(mine.float(), want)

    on_threads(check, ranks=len(nodes))


@pytest.mark.parametrize("nodes", NODES[:4], ids=str)
def test_a_ring_would_send_more_out_of_a_node(nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    topology, length = Topology(nodes), 24
    crossed = [0] * topology.num_nodes
    real = collectives.all_to_all

    def counted(rows: torch.Tensor, send: list[int], receive: list[int], world: World) -> torch.Tensor:
        mine = topology.node_of[world.rank]
        crossed[mine] += sum(n for n, node in zip(send, nodes, strict=True) if node != mine)
        return real(rows, send, receive, world)

    monkeypatch.setattr(collectives, "all_to_all", counted)
    on_threads(
        lambda world: collectives.all_reduce_by_nodes(torch.ones(length), topology, world), ranks=topology.world_size
    )
    ring = 2 * (topology.world_size - 1) / topology.world_size * length
    assert crossed == [2 * (topology.num_nodes - 1) * length // topology.num_nodes] * topology.num_nodes
    assert crossed[0] < ring or max(map(len, topology.members)) == 1
