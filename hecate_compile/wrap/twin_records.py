"""The records by which gradients of shards are averaged over the groups of ranks that have the same ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from hecate.private import parameters_of
from hecate.runtime.ops.gradients import GradientSync, ReplicatedParameter, add_replicated
from hecate.wrap.shard import shard_of
from hecate.wrap.stack_experts import ExpertStack


class TwinRecords:
    """The records of shards that other groups have, too, by the identity of their parameters."""

    def __init__(self, sync: GradientSync) -> None:
        self._sync, self.records = sync, dict[int, ReplicatedParameter]()

    def number(self, module: nn.Module, key: str, layer: int | None = None) -> int | None:
        """Return the number of a shard's record, to be averaged with those of the ``layer``; None in one group."""
        if self._sync.world.group is None:
            return None
        parameter = parameters_of(module)[key]
        shard = shard_of(parameter)
        assert parameter is not None and shard is not None
        if id(parameter) not in self.records:
            holders = partial(_members, weakref.ref(module), key) if isinstance(module, ExpertStack) else None
            self.records[id(parameter)] = add_replicated(
                module, key, self._sync, name=shard.name, layer=layer, holders=holders
            )
        return self.records[id(parameter)].id


def _members(stack: weakref.ref[ExpertStack], key: str) -> Sequence[torch.Tensor]:
    here = stack()
    return here.owned(key) if here is not None else ()
