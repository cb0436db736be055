"""Ranks that communicate with each other, and the device they compute on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hecate.private import groups, timeout_on
from hecate.runtime.comm.queue import CollectiveQueue
from hecate.runtime.comm.start import backends_of, end_with_agent, new_group_beside, start_process_group
from hecate.runtime.comm.stream_lane import StreamLane
from hecate.runtime.comm.supervise import wait_for_device
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True, kw_only=True)
class World:
    """Ranks that communicate with each other, as one of them sees it.

    Attributes:
        group: Hecate's own, or None for a single process. In the user's group, collectives of the queue's thread
            would meet those of the model's code in another order on every rank.
        chosen: by the user's mesh.
        numbers: of its ranks among all that train the model, for messages; None for 0, 1, ...
        among: all ranks that train the model; None for these.
        queue: of its jobs: its own, or that of ``among``. A model has one for its group, one for all between groups.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device
    chosen: bool = False
    numbers: tuple[int, ...] | None = None
    among: World | None = field(default=None, repr=False, compare=False)
    own_queue: bool = field(default=True, repr=False, compare=False)
    queue: CollectiveQueue = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.among is not None and not self.own_queue:
            object.__setattr__(self, "queue", self.among.queue)
            return
        lane = None
        if self.group is not None and self.device.type == "cuda" and not self.through_host:
            lane = StreamLane(self.device, wait=partial(wait_for_device, group=self.group))
        main = self.among.queue if self.among is not None else None
        object.__setattr__(self, "queue", CollectiveQueue(self.device, lane=lane, beside=main))

    @property
    def everyone(self) -> World:
        """All ranks that train the model."""
        return self.among if self.among is not None else self

    @property
    def has_first(self) -> bool:
        """Tell whether rank 0 of everyone is one of them; of groups, that of the first one."""
        return self.numbers is None or self.numbers[0] == 0

    @property
    def connected(self) -> bool:
        """Tell whether there are other ranks, and ``torch.distributed`` has not ended since."""
        return self.group is not None and self.group in groups()

    def check(self) -> None:
        """Raise RuntimeError if ``torch.distributed`` was started or ended since ``hecate.compile``."""
        if self.group is not None:
            if not self.connected:
                raise RuntimeError(
                    f"hecate: the process group of {self.size} ranks in which the model was compiled was destroyed "
                    "since. Save before destroy_process_group; after another init_process_group build the model "
                    "anew, compile it, and load"
                )
        elif not self.chosen and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "hecate: the model was compiled before init_process_group; call it first. It was compiled for one "
                f"rank, there are {dist.get_world_size()} now, and each would train a model of its own. Build the "
                "optimizer after hecate.compile, too. If one rank is what you want, give hecate.compile a mesh of one"
            )

    @property
    def through_host(self) -> bool:
        """Tell whether device tensors are sent through the host, since gloo has no all-to-all for CUDA.

        This is slow; it lets several processes share one GPU, which NCCL refuses.
        """
        on_device = self.group is not None and self.device.type != "cpu"
        return on_device and backends_of(self.group).get(self.device.type) == "gloo"

    @property
    def control_device(self) -> torch.device:
        """Device on which ``group`` takes small control tensors: the CPU, unless the group is NCCL only."""
        if self.group is not None and "cpu" not in backends_of(self.group):
            return self.device
        return torch.device("cpu")

    @property
    def counts_device(self) -> torch.device:
        """Device from which counts are sent: that of the rows if the queue has a stream, which carries both."""
        return self.device if self.queue.on_stream else self.control_device


SINGLE = World(rank=0, size=1, group=None, device=torch.device("cpu"))


def find_world(mesh: DeviceMesh | None, device: torch.device) -> World:
    """Return the world of ``mesh``, or of all ranks that torchrun started, or of this process alone.

    Starts ``torch.distributed`` in torchrun's environment. Raises ValueError if the mesh has more than one dimension
    (``mesh.find_mesh`` takes two), or models are on devices of several kinds.
    """
    end_with_agent()
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"hecate.compile: mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}, expected one, or two: groups, "
            "and the ranks of a group, between which experts are sharded. Pass the sub-mesh that the batch is split "
            "over, for example mesh['dp'] or mesh['replicate', 'expert']."
        )
    started = dist.is_available() and dist.is_initialized()
    torchrun = dist.is_available() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if mesh is None and not started and not torchrun:
        return World(rank=0, size=1, group=None, device=device)
    be_current(device)
    if mesh is None and not started:
        start_process_group(name_of(device), backend_for)
    if mesh is not None:
        return world_of(mesh.get_group(), device, chosen=True)
    return world_of(dist.group.WORLD, device, chosen=False)


def be_current(device: torch.device) -> None:
    if device.type != "cpu" and device.index is not None:
        # torch and NCCL take the current device in places; without this, ranks would meet on the first GPU.
        torch.accelerator.set_device_index(device)


def local_device() -> torch.device:
    """Return a GPU for this rank, which others share if there are too few; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    return torch.device("cuda", rank % torch.cuda.device_count())


def name_of(device: torch.device) -> str:
    """Return a text for other ranks: the kind of device, and which of all GPUs it is, whatever number it has here."""
    if device.type != "cuda":
        return device.type
    return f"cuda {torch.cuda.get_device_properties(device).uuid}"


def backend_for(names: Sequence[str]) -> str | None:
    """Return the backend for models on devices of these names (:func:`name_of`) by rank; None for torch's choice.

    NCCL carries tensors on GPUs, gloo those of the host; NCCL refuses two ranks on one GPU: there gloo carries both.
    Raises ValueError if devices are of several kinds.
    """
    kinds: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        kinds.setdefault(name.partition(" ")[0], []).append(rank)
    if len(kinds) > 1:
        found = ", ".join(f"on {kind} on ranks {ranks}" for kind, ranks in kinds.items())
        raise ValueError(f"hecate.compile: the model is {found}. Move it to the same kind of device on all ranks.")
    if "cpu" in kinds:
        return "gloo"
    if "cuda" not in kinds:
        return None
    gpus = len(set(names))
    if gpus == len(names):
        return "cpu:gloo,cuda:nccl"
    warnings.warn(
        f"hecate: {len(names)} ranks on {gpus} GPU(s). NCCL refuses ranks that share one, so they talk over gloo, "
        "through the host: right, but slow. For speed start one rank for each GPU (torchrun --nproc-per-node) and "
        "give each its own, as model.to(f\"cuda:{os.environ['LOCAL_RANK']}\") does.",
        # The line with hecate.compile.
        stacklevel=6,
    )
    return "gloo"


def world_of(group: dist.ProcessGroup | None, device: torch.device, *, chosen: bool) -> World:
    size = dist.get_world_size(group)
    if size > 1:
        _check_backend(group, device)
    own = _own_group(group, device=device) if group is not None and size > 1 else None
    return World(rank=dist.get_rank(group), size=size, group=own, device=device, chosen=chosen)


def world_among(
    ranks: Sequence[int],
    groups: tuple[dist.ProcessGroup, ...],
    device: torch.device,
    *,
    chosen: bool = False,
    numbers: tuple[int, ...] | None = None,
    among: World | None = None,
    own_queue: bool = True,
) -> World:
    """Return the world of ``ranks`` in the default group, which ``groups`` connect. A collective of theirs."""
    _check_backend(groups[0], device)
    return World(
        rank=list(ranks).index(dist.get_rank()),
        size=len(ranks),
        group=_own_group(*groups, device=device, ranks=ranks),
        device=device,
        chosen=chosen,
        numbers=numbers,
        among=among,
        own_queue=own_queue,
    )


def _check_backend(group: dist.ProcessGroup | None, device: torch.device) -> None:
    if device.type == "cpu" and "cpu" not in backends_of(group):
        raise ValueError(
            "hecate.compile: the process group is NCCL but the model is on the CPU. "
            "Move the model to this rank's GPU first, or start torch.distributed with gloo, "
            'init_process_group("gloo"): without a backend it takes NCCL alone where there is a GPU.'
        )


# Hecate's own groups, by the name of the group beside which each stands, and ranks in it. Models share one: their
# collectives are in one order on all ranks.
_own: dict[tuple[str, tuple[int, ...] | None], dist.ProcessGroup] = {}


def _own_group(
    *beside: dist.ProcessGroup, device: torch.device, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Return a group of the ranks of the one ``beside``, or of these ``ranks``, with its backend and timeout.

    A collective of all beside when it is first asked for.
    """
    first = beside[0]
    key = first.group_name, tuple(ranks) if ranks is not None else None
    own = _own.get(key)
    # A group from before ``destroy_process_group`` is gone.
    if own is None or own not in groups():
        own = _own[key] = new_group_beside(
            *beside,
            backend=dist.get_backend_config(first),
            timeout=timeout_on(first, next(iter(backends_of(first)))),
            what="hecate",
            ranks=ranks,
            device=device,
        )
    return own


def find_topology(given: Topology | None, world: World) -> Topology:
    """Return which ranks share a node: as given (ValueError if of another size), else by torchrun's environment."""
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
