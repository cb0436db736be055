"""The ranks that share one model, and the device they compute on."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hecate.runtime.comm.agent import end_with_agent
from hecate.runtime.comm.queue import CollectiveQueue
from hecate.runtime.comm.start import new_group_beside, start_process_group
from hecate.runtime.comm.stream_lane import StreamLane
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True, kw_only=True)
class World:
    """The group of ranks over which experts are sharded and gradients averaged.

    ``group`` is None for a single process, and then nothing ever communicates.

    Attributes:
        group: Hecate's own, of the same ranks as the user's. Collectives of the queue's thread and those of the
            model's own code would otherwise meet in one group, in another order on every rank.
        queue: where the collectives of graphs run.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device
    queue: CollectiveQueue = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        on_stream = self.group is not None and self.device.type == "cuda" and not self.through_host
        lane = StreamLane(self.device) if on_stream else None
        object.__setattr__(self, "queue", CollectiveQueue(self.device, lane=lane))

    @property
    def through_host(self) -> bool:
        """Whether tensors on the device must be copied to the host to be sent: gloo has no all-to-all for CUDA.

        Slow; it lets several processes share one GPU, which NCCL refuses.
        """
        on_device = self.group is not None and self.device.type != "cpu"
        return on_device and _backends(self.group).get(self.device.type) == "gloo"

    @property
    def control_device(self) -> torch.device:
        """Where small control tensors must live for ``group``: the CPU, unless the group is NCCL only."""
        if self.group is not None and "cpu" not in _backends(self.group):
            return self.device
        return torch.device("cpu")

    @property
    def counts_device(self) -> torch.device:
        """Where counts of rows travel: as the rows do, since they are sent from the stream that carries these."""
        return self.device if self.queue.on_stream else self.control_device


SINGLE = World(rank=0, size=1, group=None, device=torch.device("cpu"))


def find_world(mesh: DeviceMesh | None, device: torch.device) -> World:
    """The world of ``mesh``, or of all ranks that torchrun started, or of this process alone.

    Starts ``torch.distributed`` when torchrun's environment is there and nobody has done it yet.

    Raises:
        ValueError: the mesh has more than one dimension.
    """
    end_with_agent()
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"hecate.compile: mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}, one is needed. "
                "Pass the sub-mesh that the batch is split over, for example mesh['dp']."
            )
        return _world_of(mesh.get_group(), device)
    if not dist.is_available():
        return World(rank=0, size=1, group=None, device=device)
    if not dist.is_initialized():
        if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
            return World(rank=0, size=1, group=None, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        start_process_group(backend_for(device))
    return _world_of(dist.group.WORLD, device)


def backend_for(device: torch.device) -> str | None:
    """What ``torch.distributed`` is started with for a model on ``device``; None for its own choice.

    NCCL for tensors on GPUs, gloo for those of the host. NCCL refuses two ranks on one GPU, so if torchrun started
    more ranks here than there are GPUs, gloo takes both.
    """
    if device.type != "cuda":
        return None
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks <= gpus:
        return "cpu:gloo,cuda:nccl"
    warnings.warn(
        f"hecate: {ranks} ranks on {gpus} GPU(s). NCCL refuses ranks that share one, so they talk over gloo, through "
        "the host: right, but slow. Start torchrun with --nproc-per-node=" + str(gpus) + " for speed.",
        stacklevel=4,
    )
    return "gloo"


def _world_of(group: dist.ProcessGroup | None, device: torch.device) -> World:
    size = dist.get_world_size(group)
    if size > 1 and device.type == "cpu" and "cpu" not in _backends(group):
        raise ValueError(
            "hecate.compile: the process group is NCCL but the model is on the CPU. "
            "Move the model to this rank's GPU first, or start torch.distributed with gloo."
        )
    own = _own_group(group) if group is not None and size > 1 else None
    return World(rank=dist.get_rank(group), size=size, group=own, device=device)


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backend for each kind of device. Not ``get_backend``, which repeats the text that a group was made with."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


# By the name of the group that it is beside. Models share it: their collectives are in one order on all ranks.
_own: dict[str, dist.ProcessGroup] = {}


def _own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks, backend and timeout. A collective of these ranks when it is first asked for."""
    own = _own.get(group.group_name)
    # Those of before destroy_process_group are gone.
    if own is None or own not in dist.distributed_c10d._world.pg_map:
        # A fake group has no options.
        options = group._get_backend(torch.device(next(iter(_backends(group))))).options
        timeout = options._timeout if options is not None else None
        own = new_group_beside(group, backend=dist.get_backend_config(group), timeout=timeout, what="hecate")
        _own[group.group_name] = own
    return own


def find_topology(given: Topology | None, world: World) -> Topology:
    """Which ranks of ``world`` share a node: as given, else by torchrun's LOCAL_WORLD_SIZE, else all of them.

    Raises:
        ValueError: the given topology has another number of ranks.
    """
    if given is not None:
        if given.world_size != world.size:
            raise ValueError(
                f"hecate.Config: topology has {given.world_size} ranks, the process group has {world.size}"
            )
        return given
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.group is None or local < 1:
        return Topology.even(world.size, world.size)
    machines = [rank // local for rank in dist.get_process_group_ranks(world.group)]
    numbers = {machine: number for number, machine in enumerate(sorted(set(machines)))}
    return Topology(tuple(numbers[machine] for machine in machines))
