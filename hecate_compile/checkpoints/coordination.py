"""Messages between ranks while they save and load, as JSON: if one fails alone (a full disk), all must hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hecate.compiled_model import compiled_model_of, is_compiled
from hecate.private import groups
from hecate.runtime.comm.agreement import gather_json, meet
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.start import new_group_beside
from hecate.runtime.comm.world import World

T = TypeVar("T")

# Groups for checkpoints, by the name of the training group with the same ranks.
_groups: dict[str, dist.ProcessGroup] = {}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; raised on every rank, and says which rank had what."""


class MismatchError(CheckpointError):
    """The files are of another model or optimizer."""


class Ranks:
    """The ranks that share one model; ``group`` is a gloo group of them, None for a single process."""

    def __init__(self, world: World, function: str) -> None:
        self._world, self._function = world, function
        self.rank, self.size, self.group = world.rank, world.size, world.group

    @property
    def first(self) -> bool:
        """True on rank 0, which decides and publishes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON data of every rank, in rank order; a collective."""
        with doing(self._function):
            return gather_json(value, self._world)

    def from_first(self, value: Any) -> Any:
        """Return the JSON data of rank 0."""
        return self.gather(value if self.first else None)[0]

    def agree(self, **arguments: Any) -> None:
        """Raise ValueError on every rank if they were called with different arguments."""
        told = self.gather({name: str(value) for name, value in arguments.items()})
        for name, value in told[0].items():
            for rank, others in enumerate(told):
                if others[name] != value:
                    raise ValueError(
                        f"{self._function}: {name} is {value} on rank 0 and {others[name]} on rank {rank}. All ranks "
                        "must give the same"
                    )

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; if it fails on any, all raise an error that names the first, and why."""
        results: list[T] = []
        error: Exception | None = None
        try:
            results.append(work())
        except Exception as problem:
            error = problem
        told = self.gather(None if error is None else describe(error))
        for rank, text in enumerate(told):
            if text is not None:
                raise CheckpointError(f"{self._function}: rank {rank}: {text}") from error
        return results[0]

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 and give its JSON result to all; if it fails, all of them raise."""
        result = self.together(lambda: work() if self.first else None)
        return self.from_first(result)


def describe(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def ranks_of(model: nn.Module | None, function: str) -> Ranks:
    """Return the ranks that share ``model``; all ranks, if it is not compiled. A collective."""
    if model is not None and is_compiled(model):
        world = compiled_model_of(model, function).world
        group = world.group
        if group is not None:
            world.queue.drain()
    else:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None or dist.get_world_size(group) == 1:
        return Ranks(World(rank=0, size=1, group=None, device=torch.device("cpu")), function)
    # Raises if another rank is in another function.
    meet(function, group)
    own = _group_beside(group)
    world = World(rank=dist.get_rank(own), size=dist.get_world_size(own), group=own, device=torch.device("cpu"))
    return Ranks(world, function)


def _group_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, made at the first call: training goes on while a thread saves."""
    own = _groups.get(group.group_name)
    if own is None or own not in groups():
        own = new_group_beside(group, backend="gloo", timeout=None, what="hecate checkpoints")
        _groups[group.group_name] = own
    return own
