"""Replace every expert parameter by this rank's shard of it.

A shard is a plain ``nn.Parameter`` ``[E_r, ...]`` under the parameter's old name, with a :class:`Shard`
record attached. Why a plain parameter: see docs/decisions.md. The model's ``state_dict()`` still shows one
full ``[E, ...]`` tensor per name, and ``load_state_dict()`` takes it back.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners, slices_of
from hecate.runtime.state.layer import Layer, add_layer
from hecate.runtime.state.placer import Placer
from hecate.wrap.dense_shards import DenseSharding, Places, dense_shard_of
from hecate.wrap.find_experts import ExpertsModule

_SHARD = "_hecate_shard"


@dataclass(frozen=True)
class Shard:
    """What a shard parameter is a shard of.

    Attributes:
        name: qualified parameter name in the model.
        layer: the layer's record; its owners say which experts the rows are.
        full_shape: ``[E, ...]``.
    """

    name: str
    layer: Layer
    full_shape: torch.Size

    @property
    def experts(self) -> list[int]:
        """The experts of this rank, row by row."""
        return self.layer.owners.owned_by(self.layer.world.rank)


def shard_of(parameter: torch.Tensor | None) -> Shard | None:
    """The record of a shard parameter; None for every other tensor."""
    return getattr(parameter, _SHARD, None)


def shard_experts(found: Sequence[ExpertsModule], world: World, placer: Placer) -> list[Layer]:
    """Keep this rank's experts of each module, with rank 0's values, and free the rest.

    A parameter may be on the meta device on ranks other than 0 (see :func:`materialize`).
    """
    layers = []
    for experts in found:
        owners = Owners.contiguous(experts.num_experts, world.size)
        layer = add_layer(name=experts.name, owners=owners, world=world, placer=placer)
        for key in experts.parameters:
            _shard_parameter(experts, key, layer)
        _keep_state_dict_full(experts.module, experts.parameters)
        layers.append(layer)
    return layers


def _shard_parameter(experts: ExpertsModule, key: str, layer: Layer) -> None:
    world, owners = layer.world, layer.owners
    full = experts.module._parameters[key]
    assert full is not None
    mine = owners.owned_by(world.rank)
    with torch.no_grad():
        if full.is_meta:
            local = torch.empty((len(mine), *full.shape[1:]), dtype=full.dtype, device=world.device)
        else:
            local = slices_of(full.detach(), mine)
        if world.group is not None:
            collectives.scatter_shards(full.detach() if world.rank == 0 else None, local, owners, world)
    name = f"{experts.name}.{key}".lstrip(".")
    experts.module._parameters[key] = _as_shard(
        local, Shard(name, layer, full.shape), requires_grad=full.requires_grad
    )


def _as_shard(local: torch.Tensor, shard: Shard, *, requires_grad: bool) -> nn.Parameter:
    parameter = nn.Parameter(local, requires_grad=requires_grad)
    setattr(parameter, _SHARD, shard)
    if shard.layer.world.size > 1:
        # Ranks own different numbers of experts and the numbers may change: a size the graph must not know.
        torch._dynamo.decorators.mark_unbacked(parameter, 0)
    return parameter


def size_up(found: Sequence[ExpertsModule], layers: Sequence[Layer], dtype: torch.dtype | None) -> None:
    """Tell each layer what one of its experts weighs on the wire and computes per row, in ``dtype`` or its own."""
    for experts, layer in zip(found, layers, strict=True):
        shapes = [p.shape[1:] for p in map(experts.module._parameters.get, experts.parameters) if p is not None]
        layer.dtype = dtype or next(iter(experts.module.parameters(recurse=False))).dtype
        layer.expert_bytes = sum(shape.numel() for shape in shapes) * layer.dtype.itemsize
        layer.row_flops = sum(2 * shape.numel() for shape in shapes if len(shape) == 2)


# --- one logical tensor in state_dict ---


def _keep_state_dict_full(module: nn.Module, keys: tuple[str, ...]) -> None:
    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in keys:
            parameter = state.get(prefix + key)
            if parameter is not None:
                layer = _record(module, prefix, key).layer
                state[prefix + key] = collectives.gather_shards(parameter.detach(), layer.owners, layer.world)

    def scatter(
        module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        for key in keys:
            current, full = module._parameters[key], state.get(prefix + key)
            if full is None or current is None:
                continue
            shard = _record(module, prefix, key)
            if tuple(full.shape) != tuple(shard.full_shape):
                errors.append(
                    f"{prefix + key}: the checkpoint has {list(full.shape)}, the model {list(shard.full_shape)}. "
                    "hecate models load full tensors; every rank slices its experts itself."
                )
                del state[prefix + key]
                continue
            local = slices_of(full.detach(), shard.experts)
            state[prefix + key] = _as_shard(local, shard, requires_grad=current.requires_grad)

    module.register_state_dict_post_hook(gather)
    module.register_load_state_dict_pre_hook(scatter)


def _record(module: nn.Module, prefix: str, key: str) -> Shard:
    shard = shard_of(module._parameters[key])
    if shard is None:
        raise RuntimeError(
            f"hecate: {prefix + key} is no longer the shard that hecate.compile made; something replaced the "
            "parameter. Load weights with load_state_dict."
        )
    return shard


# --- meta device ---


def has_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer still has no storage."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module,
    found: Sequence[ExpertsModule],
    world: World,
    placer: Placer,
    places: Places,
    dense: DenseSharding | None,
) -> list[Layer]:
    """Give a meta-device model storage, and shard it on the way, one module after the other.

    Rank 0 initializes each module with the model's own ``_init_weights`` or ``reset_parameters``; the others
    only allocate what they keep, since values come from rank 0. Of what is sharded, rank 0 holds one module at a
    time.

    Args:
        dense: shards the dense parameters too; None keeps them whole.
    """
    experts = {id(e.module): e for e in found}
    layers: list[Layer] = []
    uninitialized: list[str] = []
    for name, module in model.named_modules():
        own = experts.get(id(module))
        elsewhere = (*(own.parameters if own else ()), *(dense.keys(module) if dense else ()))
        skip = elsewhere if world.rank != 0 else ()
        uninitialized += _make_real(model, name, world, places, skip)
        if own is not None:
            layers += shard_experts([own], world, placer)
        if dense is not None:
            dense.shard(name, module)
    if uninitialized:
        warnings.warn(
            f"hecate.compile: nothing initialized {', '.join(uninitialized[:8])}, which came from the meta device: "
            "no _init_weights or reset_parameters writes them. They are NaN, or 0 for integers, until you fill them: "
            "with load_state_dict, or, for buffers that are not in it, by computing them again.",
            stacklevel=3,
        )
    return layers


def _make_real(model: nn.Module, name: str, world: World, places: Places, skip: Sequence[str]) -> list[str]:
    """Replace a module's own meta tensors, initialize them on rank 0; returns the names of what nothing wrote."""
    module = model.get_submodule(name)
    fresh = _allocate(module, world.device, places, skip)
    if not fresh or world.rank != 0:
        return []
    versions = {key: tensor._version for key, tensor in fresh.items()}
    _initialize(model, name, module)
    return [f"{name}.{key}".lstrip(".") for key, tensor in fresh.items() if tensor._version == versions[key]]


def _allocate(
    module: nn.Module, device: torch.device, places: Places, skip: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Replace the module's own meta tensors by NaN-filled ones, and return these; tied parameters stay tied."""
    fresh: dict[str, torch.Tensor] = {}
    for key, parameter in list(module._parameters.items()):
        if parameter is None or not parameter.is_meta or key in skip or module._parameters[key] is not parameter:
            continue
        fresh[key] = real = nn.Parameter(_unwritten(parameter, device), requires_grad=parameter.requires_grad)
        places.replace(parameter, real)
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = fresh[key] = _unwritten(buffer, device)
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
            if hasattr(outer, "_init_weights"):
                outer._init_weights(module)
                break
        else:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()


def copy_from_rank0(model: nn.Module, world: World) -> None:
    """Whole parameters and buffers take rank 0's values, so that differently seeded ranks train one model."""
    if world.group is None:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if shard_of(tensor) is None and dense_shard_of(tensor) is None and tensor.numel():
                collectives.broadcast(tensor.detach(), world)
