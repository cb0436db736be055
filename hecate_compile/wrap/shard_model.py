"""Shard a model: every rank keeps its part, with rank 0's values, also from the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hecate.config import Config
from hecate.private import INIT_WEIGHTS, buffers_of, has_flat_weights, parameters_of, version_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import gather_json
from hecate.runtime.comm.mesh import Mesh
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.comm.world import World
from hecate.runtime.one_sided.carrier import OneSided
from hecate.runtime.ops.by_collectives import ByCollectives
from hecate.runtime.ops.by_nodes import ByNodes
from hecate.runtime.ops.dense import add_dense_shard
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Carrier, Layer
from hecate.runtime.state.placer import Placer
from hecate.wrap.carry_over import ParameterSites
from hecate.wrap.expert_shards import shard_experts
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.full_state_dict import keep_lists_full, keep_state_dicts_full
from hecate.wrap.lora_experts import save_adapters_by_old_names
from hecate.wrap.shard import as_parameter, shard_of, take_from_rank0
from hecate.wrap.stack_experts import split_stacks, stack_experts


def shard_model(
    model: nn.Module,
    found: Sequence[ExpertsModule],
    mesh: Mesh,
    placer: Placer,
    sync: GradientSync,
    carrier: Carrier,
    *,
    left_out: Collection[str],
    shard_dense: bool,
    towers: Collection[nn.Module] = (),
) -> list[Layer]:
    """Shard the experts, and with ``shard_dense`` all else but ``towers``; return each experts module's record.

    A collective. Experts modules that are named in ``left_out`` do not call experts that have no rows.
    """
    stack_experts(found, left_out)
    sites = ParameterSites(model)
    dense = DenseSharding(found, sites, mesh, sync, towers) if shard_dense else None
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
            layers.append(shard_experts(own, sites, mesh, placer, carrier))
        if dense is not None:
            dense.shard(name, module)
    if is_meta:
        warn_uninitialized(uninitialized, mesh.everyone)
    keep_state_dicts_full(model, sites, mesh.everyone)
    split_stacks(found)
    keep_lists_full(found)
    save_adapters_by_old_names(found)
    _copy_from_rank0(model, mesh)
    return layers


def _copy_from_rank0(model: nn.Module, mesh: Mesh) -> None:
    """Give whole parameters and buffers rank 0's values, so that differently seeded ranks train one model.

    DTensors get those of the first rank with the same part.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        world = mesh.batch if isinstance(tensor, DTensor) else mesh.everyone
        if world.group is not None and shard_of(tensor) is None and tensor.numel():
            with torch.no_grad():
                collectives.broadcast(collectives.part_of(tensor.detach()), world)


class DenseSharding:
    """Shards the parameters of one model that are not those of ``found``, one module at a time.

    All ranks gather rows together, and a rank with text alone calls no tower, so those of ``towers`` stay whole.
    """

    def __init__(
        self,
        found: Sequence[ExpertsModule],
        sites: ParameterSites,
        mesh: Mesh,
        sync: GradientSync,
        towers: Collection[nn.Module] = (),
    ) -> None:
        self._experts = {id(e.store): e.parameters for e in found}
        self._sites, self._mesh, self._towers = sites, mesh, set(map(id, towers))
        self._sync = sync.among(mesh.group)

    def keys(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the module's own parameters that are to be sharded."""
        return tuple(
            key
            for key, parameter in parameters_of(module).items()
            if parameter is not None
            and shard_of(parameter) is None
            # What other ranks than these share already stays as it is.
            and not isinstance(parameter, DTensor)
            and parameter.ndim > 0
            and parameter.shape[0] > 1
            and parameter.numel() > 0
            # Parameters of experts anywhere, and of ``nn.LSTM`` and its kin, which read theirs elsewhere.
            and not any(
                has_flat_weights(holder) or id(holder) in self._towers or own in self._experts.get(id(holder), ())
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
        world = self._mesh.group
        shard = add_dense_shard(name, full.shape, self._sync)
        with torch.no_grad():
            local = torch.zeros(shard.shape, dtype=full.dtype, device=world.device)
            mine = local[: shard.counts[world.rank]]
            whole = full.detach() if world.rank == 0 else None
            take_from_rank0(local, self._mesh, lambda: collectives.scatter_rows(whole, mine, shard.counts, world))
        self._sites.replace(full, as_parameter(local, shard, requires_grad=full.requires_grad))


def _by_collectives(config: Config, topology: Topology, world: World) -> Carrier:
    return ByCollectives() if config.dispatch == "rows" else ByNodes()


def _one_sided(config: Config, topology: Topology, world: World) -> Carrier:
    return OneSided.between(world, topology, config.room_percent)


CARRIERS: dict[str, Callable[[Config, Topology, World], Carrier]] = {
    "collectives": _by_collectives,
    "symmetric": _one_sided,
}


def choose_carrier(config: Config, topology: Topology, world: World) -> Carrier:
    """Return the carrier of a model's layers, a collective; ValueError or RuntimeError if ranks cannot use it."""
    return (CARRIERS[config.transport] if world.size > 1 else _by_collectives)(config, topology, world)


def has_meta(model: nn.Module) -> bool:
    """Return whether any parameter or buffer has no storage yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def make_module_real(
    model: nn.Module, name: str, world: World, sites: ParameterSites, skip: Sequence[str]
) -> list[str]:
    """Replace a module's own meta tensors, initialized on rank 0 alone; return the names of those left unwritten.

    Parameters in ``skip``, of which this rank keeps only a part, stay on the meta device.
    """
    module = model.get_submodule(name)
    fresh = _allocate(module, world.device, sites, skip)
    if not fresh or world.rank != 0:
        return []
    versions = {key: version_of(tensor) for key, tensor in fresh.items()}
    _initialize(model, name, module)
    return [f"{name}.{key}".lstrip(".") for key, tensor in fresh.items() if version_of(tensor) == versions[key]]


def _allocate(
    module: nn.Module, device: torch.device, sites: ParameterSites, skip: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Replace the module's own meta tensors by NaN-filled ones, and return these; tied parameters stay tied."""
    fresh: dict[str, torch.Tensor] = {}
    for key, parameter in list(parameters_of(module).items()):
        if parameter is None or not parameter.is_meta or key in skip or parameters_of(module)[key] is not parameter:
            continue
        fresh[key] = real = nn.Parameter(_unwritten(parameter, device), requires_grad=parameter.requires_grad)
        sites.replace(parameter, real)
    for key, buffer in buffers_of(module).items():
        if buffer is not None and buffer.is_meta:
            buffers_of(module)[key] = fresh[key] = _unwritten(buffer, device)
    return fresh


def _unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    real = torch.empty_like(like, device=device, requires_grad=False)
    return real.fill_(float("nan")) if real.is_floating_point() else real.zero_()


def _initialize(model: nn.Module, name: str, module: nn.Module) -> None:
    """Run the nearest enclosing ``_init_weights(module)``, or ``module.reset_parameters()``."""
    with torch.no_grad():
        path = name.split(".") if name else []
        for depth in range(len(path), -1, -1):
            outer: Any = model.get_submodule(".".join(path[:depth]))
            if hasattr(outer, INIT_WEIGHTS):
                getattr(outer, INIT_WEIGHTS)(module)
                break
        else:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()


def warn_uninitialized(names: Sequence[str], world: World) -> None:
    """Warn of tensors that came from the meta device and have no values yet, as rank 0 knows them. A collective."""
    if world.group is not None:
        names = gather_json(names, world)[0]
    if names:
        warn_together(
            f"hecate.compile: nothing initialized {', '.join(names[:8])}, which came from the meta device: "
            "no _init_weights or reset_parameters writes them. They are NaN, or 0 for integers, until you fill them: "
            "with load_state_dict, or, for buffers that are not in it, by computing them again.",
            world.rank,
            stacklevel=5,
        )
