"""Which ranks share a node, where they compute, and what their process group is started with."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm import world as world_module
from hecate.runtime.comm.world import SINGLE, World, backend_for, find_topology, find_world, local_device, name_of
from hecate.runtime.placement.topology import Topology
from tests.support.ranks import run_ranks
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


def test_a_group_is_started_with_what_its_devices_need() -> None:
    assert backend_for(["cpu", "cpu"]) == "gloo"
    assert backend_for(["cuda a", "cuda b"]) == "cpu:gloo,cuda:nccl"
    assert backend_for(["xpu", "xpu"]) is None
    with pytest.raises(ValueError, match=r"on cpu on ranks \[0, 2\], on cuda on ranks \[1\]\. Move it"):
        backend_for(["cpu", "cuda a", "cpu"])
    with pytest.warns(UserWarning, match=r"4 ranks on 2 GPU\(s\).*one rank for each GPU"):
        assert backend_for(["cuda a", "cuda b", "cuda a", "cuda b"]) == "gloo"


def test_a_gpu_has_the_same_name_whatever_its_number_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {0: "GPU 7 of this machine", 1: "another"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=seen[torch.device(device).index])
    )
    assert name_of(torch.device("cpu")) == "cpu"
    one, other = name_of(torch.device("cuda", 0)), name_of(torch.device("cuda", 1))
    assert backend_for([one, other]) == "cpu:gloo,cuda:nccl"
    # Another process sees this GPU alone.
    seen[0] = "another"
    assert name_of(torch.device("cuda", 0)) == other


def test_the_device_of_a_rank_wraps_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert local_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_device() == torch.device("cuda", 0)


def test_the_models_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a group that the user started, who may not have done it."""
    found: list[torch.device] = []
    mesh: Any = SimpleNamespace(ndim=1, get_group=lambda: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    monkeypatch.setattr(world_module, "world_of", lambda group, device, chosen: SINGLE)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    find_world(None, torch.device("cuda", 1))
    find_world(mesh, torch.device("xpu", 2))
    find_world(None, torch.device("cpu"))
    assert found == [torch.device("cuda", 1), torch.device("xpu", 2)]


class Group:
    """A group that the user started, as far as it is looked at."""

    group_name = "of the user"

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=None)


def test_a_group_beside_one_of_nccl_alone_begins_on_the_models_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Group()
    made: list[torch.device] = []
    tensor = torch.tensor

    def take_note(data: Any, *, device: Any) -> torch.Tensor:
        made.append(torch.device(device))
        return tensor(data)

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(world_module, "_own", {})
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("cuda:nccl", dist.HashStore()))
    monkeypatch.setattr("hecate.runtime.comm.start.default_group", lambda: group)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda *ranks, **options: Group())
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **options: None)
    monkeypatch.setattr(torch, "tensor", take_note)
    world_module._own_group(group, device=torch.device("cuda", 1))
    assert made == [torch.device("cuda", 1)]


def beside_a_gpu() -> list[str]:
    """A model on the CPU of a machine that has a GPU."""
    pytest.MonkeyPatch().setattr(torch._C, "_get_accelerator", lambda *given: torch.device("cuda"))
    world = find_world(None, torch.device("cpu"))
    assert world.group is not None
    number = torch.ones(1)
    dist.all_reduce(number, group=world.group)
    assert number.item() == 2
    return [_for_cpu(world.group), _for_cpu(dist.group.WORLD)]


def _for_cpu(group: Any) -> str:
    return next(pair for pair in dist.get_backend_config(group).split(",") if pair.startswith("cpu:"))


@pytest.mark.distributed
def test_a_model_on_the_cpu_runs_beside_a_gpu() -> None:
    assert run_ranks(beside_a_gpu, 2) == 2 * [["cpu:gloo", "cpu:gloo"]]


def test_a_world_is_gone_with_its_last_reference() -> None:
    """Its queue's thread ends then, and not whenever garbage is collected."""
    gc.disable()
    try:
        world = World(rank=0, size=1, group=None, device=torch.device("cpu"))
        queue = weakref.ref(world.queue)
        del world
        assert queue() is None
    finally:
        gc.enable()
