"""Replace every dense parameter by this rank's rows of it: a shard ``[ceil(d / W), ...]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn

from hecate.private import has_flat_weights, parameters_of
from hecate.runtime.comm import collectives
from hecate.runtime.ops.dense import DenseShard, add_dense_shard
from hecate.runtime.ops.gradients import GradientSync
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.parameter_sites import ParameterSites
from hecate.wrap.shard import Shard, as_parameter, shard_of


def is_dense_shard(shard: Shard | None) -> TypeGuard[DenseShard]:
    """Return whether a record is of dense rows."""
    return isinstance(shard, DenseShard)


class DenseSharding:
    """Shards the dense parameters of one model, one module at a time.

    Args:
        found: modules whose parameters are not dense.
    """

    def __init__(self, found: Sequence[ExpertsModule], sites: ParameterSites, sync: GradientSync) -> None:
        self._experts = {id(e.module): e.parameters for e in found}
        self._sites, self._sync = sites, sync

    def keys(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the module's own parameters that are to be sharded.

        Left out are those with fewer than two rows, and those of ``nn.LSTM`` and its kin, which keep and read their
        parameters elsewhere.
        """
        return tuple(
            key
            for key, parameter in parameters_of(module).items()
            if parameter is not None
            and key not in self._experts.get(id(module), ())
            and shard_of(parameter) is None
            and parameter.ndim > 0
            and parameter.shape[0] > 1
            and parameter.numel() > 0
            and not any(has_flat_weights(holder) for holder, _ in self._sites.of(parameter))
        )

    def shard(self, name: str, module: nn.Module) -> None:
        """Keep this rank's rows of the module's dense parameters, with rank 0's values, and free the rest.

        A collective. Parameters may be on the meta device on ranks other than 0.
        """
        for key in self.keys(module):
            full = parameters_of(module)[key]
            if full is not None and shard_of(full) is None:
                self._shard_parameter(f"{name}.{key}".lstrip("."), full)

    def _shard_parameter(self, name: str, full: nn.Parameter) -> None:
        world = self._sync.world
        shard = add_dense_shard(name, full.shape, self._sync)
        with torch.no_grad():
            local = torch.zeros(shard.shape, dtype=full.dtype, device=world.device)
            mine = local[: shard.counts[world.rank]]
            collectives.scatter_rows(full.detach() if world.rank == 0 else None, mine, shard.counts, world)
        self._sites.replace(full, as_parameter(local, shard, requires_grad=full.requires_grad))
