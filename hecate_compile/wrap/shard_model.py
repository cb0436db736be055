"""Shard a model: every rank keeps its part, with rank 0's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hecate.private import has_flat_weights, parameters_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import Mesh, World
from hecate.runtime.ops.dense import add_dense_shard
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.state.layer import Carrier, Layer
from hecate.runtime.state.placer import Placer
from hecate.wrap.carry_over import ParameterSites
from hecate.wrap.expert_shards import shard_experts
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.full_state_dict import keep_state_dicts_full
from hecate.wrap.lora_experts import save_adapters_by_old_names
from hecate.wrap.materialize import has_meta, make_module_real, warn_uninitialized
from hecate.wrap.shard import as_parameter, shard_of
from hecate.wrap.stack_experts import save_by_old_names, stack_experts


def shard_model(
    model: nn.Module,
    found: Sequence[ExpertsModule],
    mesh: Mesh,
    placer: Placer,
    sync: GradientSync,
    carrier: Carrier,
    *,
    shard_dense: bool,
) -> list[Layer]:
    """Shard the experts, and with ``shard_dense`` all else; return each experts module's record; a collective."""
    stack_experts(found)
    sites = ParameterSites(model)
    dense = DenseSharding(found, sites, sync) if shard_dense else None
    experts = {id(e.module): e for e in found}
    is_meta, layers, uninitialized = has_meta(model), list[Layer](), list[str]()
    # Of a model on the meta device a rank holds one whole module at a time.
    for name, module in model.named_modules():
        own = experts.get(id(module))
        if is_meta:
            elsewhere = (*(own.parameters if own else ()), *(dense.keys(module) if dense else ()))
            first = mesh.everyone.rank == 0
            uninitialized += make_module_real(model, name, mesh.everyone, sites, () if first else elsewhere)
        if own is not None:
            layers.append(shard_experts(own, sites, mesh.group, placer, carrier))
        if dense is not None:
            dense.shard(name, module)
    if is_meta:
        warn_uninitialized(uninitialized, mesh.everyone)
    keep_state_dicts_full(model, sites, mesh.everyone)
    save_by_old_names(found)
    save_adapters_by_old_names(found)
    _copy_from_rank0(model, mesh.everyone)
    return layers


def _copy_from_rank0(model: nn.Module, world: World) -> None:
    """Give whole parameters and buffers rank 0's values, so that differently seeded ranks train one model."""
    if world.group is None:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if shard_of(tensor) is None and tensor.numel():
                collectives.broadcast(tensor.detach(), world)


class DenseSharding:
    """Shards the parameters of one model that are not those of ``found``, one module at a time."""

    def __init__(self, found: Sequence[ExpertsModule], sites: ParameterSites, sync: GradientSync) -> None:
        self._experts = {id(e.module): e.parameters for e in found}
        self._sites, self._sync = sites, sync

    def keys(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the module's own parameters that are to be sharded."""
        return tuple(
            key
            for key, parameter in parameters_of(module).items()
            if parameter is not None
            and shard_of(parameter) is None
            and parameter.ndim > 0
            and parameter.shape[0] > 1
            and parameter.numel() > 0
            # Parameters of experts anywhere, and of ``nn.LSTM`` and its kin, which read theirs elsewhere.
            and not any(
                has_flat_weights(holder) or own in self._experts.get(id(holder), ())
                for holder, own in self._sites.of(parameter)
            )
        )

    def shard(self, name: str, module: nn.Module) -> None:
        """Keep this rank's rows of the module's dense parameters, with rank 0's values; a collective."""
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
