"""Warn if all ranks train on the same batches, which losses do not show: the loader does not know of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from hecate.private import is_traceable_wrapper_subclass, tree_leaves
from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.world import World
from hecate.runtime.state.step_mode import StepMode

# Training forwards whose inputs are compared: one batch may be the same by chance, or be made up to warm up.
_FORWARDS = 3
# Multiplies the digest of earlier inputs; odd, so that no bit of them is lost.
_FACTOR = 6364136223846793005


class SameBatches:
    """Compares the inputs of the first training forwards between ranks, once and in one collective."""

    def __init__(self, world: World, *, enabled: bool) -> None:
        self._world = world
        self._forwards = 0 if enabled and world.group is not None else _FORWARDS + 1
        self._digest: Tensor | None = None

    def before_forward(self, mode: StepMode, args: Any, kwargs: Any) -> None:
        if not mode.training or self._forwards > _FORWARDS:
            return
        if self._forwards == _FORWARDS:
            self._compare()
        else:
            self._add([leaf for leaf in tree_leaves((args, kwargs)) if _has_bytes(leaf)])
        self._forwards += 1

    @torch.no_grad()
    def _add(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            # Kept on the model's device, where nobody waits for it.
            digest = _digest(tensor).to(self._world.device)
            self._digest = digest if self._digest is None else self._digest * _FACTOR + digest

    def _compare(self) -> None:
        """Compare digests, and warn. A collective, to which a rank without inputs comes, too."""
        world, mine = self._world, self._digest
        self._digest = None
        digest = torch.zeros((), dtype=torch.int64, device=world.device) if mine is None else mine
        told = torch.stack([digest, torch.full_like(digest, mine is not None)])
        # This collective must not run at the same time as those that graphs have started.
        world.queue.drain()
        with doing("the comparison of batches"):
            every = collectives.all_gather_even(told.to(world.control_device), world).tolist()
        if world.rank == 0 and all(line == every[0] for line in every) and every[0][1]:
            warnings.warn(
                f"hecate: in the first {_FORWARDS} training forwards all {world.size} ranks had the same batches, so "
                f"{world.size} ranks do the work of one. A loader must know of ranks to give each its own part of "
                "the data: DataLoader(data, sampler=torch.utils.data.DistributedSampler(data, num_replicas=ranks, "
                "rank=rank)); for a stream datasets.distributed.split_dataset_by_node; for batches that are drawn at "
                "random, another seed on each rank.",
                stacklevel=2,
            )


def _has_bytes(leaf: Any) -> bool:
    plain = isinstance(leaf, Tensor) and leaf.layout == torch.strided and not is_traceable_wrapper_subclass(leaf)
    return plain and leaf.numel() > 0 and leaf.device.type != "meta"


def _digest(tensor: Tensor) -> Tensor:
    """Return an int64 scalar that changes with the bytes of ``tensor`` and with their order."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    places = torch.arange(len(words), device=words.device)
    return (words * (2 * places + 1)).sum() + len(raw)
