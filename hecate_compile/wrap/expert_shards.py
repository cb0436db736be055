"""Replace every expert parameter by this rank's experts of it: a shard ``[E_r, ...]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from hecate.private import parameters_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.mesh import Mesh
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner import LayerSizes
from hecate.runtime.state.layer import Carrier, Layer, add_layer
from hecate.runtime.state.placer import Placer
from hecate.wrap.carry_over import ParameterSites
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.shard import Shard, as_parameter, shard_of, take_from_rank0


@dataclass(frozen=True)
class _OfLayer:
    """What the records of experts have in common; see :class:`hecate.wrap.shard.Shard`."""

    name: str
    layer: Layer  # its owners say which experts a rank has
    full_shape: torch.Size
    part: str = "experts"
    length_varies: bool = True

    @property
    def world(self) -> World:
        return self.layer.world


@dataclass(frozen=True)
class ExpertShard(_OfLayer):
    """The experts that this rank owns, of one parameter ``[E, ...]``: a row for each, or ``lines`` rows."""

    lines: int = 1

    @property
    def experts(self) -> list[int]:
        """The experts of this rank, row by row."""
        return self.layer.owners.owned_by(self.world.rank)

    def slice(self, full: torch.Tensor) -> torch.Tensor:
        return self.as_written(collectives.slices_of(self.by_expert(full), self.experts))

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        return self.as_written(collectives.gather_shards(self.by_expert(local), self.layer.owners, self.world))

    def moved(self, local: torch.Tensor, old: Owners, new: Owners) -> torch.Tensor:
        """Return what this rank has under ``new`` owners of what all ranks have under ``old`` ones. A collective."""
        return self.as_written(collectives.move_shards(self.by_expert(local), old, new, self.world))

    def by_expert(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a part of the parameter, or the whole, with a row for each expert: a view ``[n, ...]``."""
        return tensor.view(-1, self.lines, *tensor.shape[1:]) if self.lines > 1 else tensor

    def as_written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what has a row for each expert as the model has it: a view."""
        return tensor.flatten(0, 1) if self.lines > 1 else tensor


@dataclass(frozen=True)
class MemberShard(_OfLayer):
    """A parameter of one expert in a list: whole on its owner, and empty on the other ranks."""

    expert: int = field(kw_only=True)

    @property
    def owner(self) -> int:
        return self.layer.owners.ranks[self.expert]

    @property
    def owned(self) -> bool:
        return self.owner == self.world.rank

    def slice(self, full: torch.Tensor) -> torch.Tensor:
        return full.clone() if self.owned else full.new_empty((0, *full.shape[1:]))

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        return self.from_owner(local[None] if self.owned else local.new_empty((0, *self.full_shape)))

    def from_owner(self, row: torch.Tensor) -> torch.Tensor:
        """Return the owner's ``row``, ``[1, ...]``, on every rank as ``[...]``; others give ``[0, ...]``."""
        return collectives.gather_shards(row, Owners((self.owner,), self.world.size), self.world)[0]


def is_expert_shard(shard: Shard | None) -> TypeGuard[ExpertShard]:
    """Return whether a record is of several experts, a row for each; for code that is about owners."""
    return isinstance(shard, ExpertShard)


def is_member_shard(shard: Shard | None) -> TypeGuard[MemberShard]:
    """Return whether a record is of one expert, which has parameters of its own."""
    return isinstance(shard, MemberShard)


def shard_experts(
    experts: ExpertsModule, sites: ParameterSites, mesh: Mesh, placer: Placer, carrier: Carrier
) -> Layer:
    """Keep this rank's experts of a module, with rank 0's values, and return the layer's record; a collective."""
    world = mesh.group
    shards = [shard_of(parameters_of(experts.store)[key]) for key in experts.parameters]
    # Modules that share a parameter share a record: an expert has one owner.
    layer = next((shard.layer for shard in shards if is_expert_shard(shard)), None)
    if layer is not None and layer.num_experts != experts.num_experts:
        raise ValueError(
            f"hecate.compile: {experts.name} has {experts.num_experts} experts and shares their parameters with "
            f"{layer.name}, which has {layer.num_experts}."
        )
    if layer is None:
        owners = Owners.contiguous(experts.num_experts, world.size)
        layer = add_layer(name=experts.name, owners=owners, world=world, carrier=carrier, placer=placer)
    for key in experts.parameters:
        _shard_parameter(experts, key, layer, sites, mesh)
    return layer


def _shard_parameter(experts: ExpertsModule, key: str, layer: Layer, sites: ParameterSites, mesh: Mesh) -> None:
    full = parameters_of(experts.store)[key]
    assert full is not None
    if shard_of(full) is not None:
        return
    lines = len(full) // experts.num_experts
    shard = ExpertShard(f"{experts.name}.{key}".lstrip("."), layer, full.shape, lines=lines)
    with torch.no_grad():
        if full.is_meta:
            shape = (len(shard.experts) * lines, *full.shape[1:])
            local = torch.empty(shape, dtype=full.dtype, device=layer.world.device)
        else:
            # A move of owners makes contiguous shards, and other strides would be another graph.
            local = shard.slice(full.detach()).contiguous()

        def scatter() -> None:
            whole = shard.by_expert(full.detach()) if layer.world.rank == 0 else None
            collectives.scatter_shards(whole, shard.by_expert(local), layer.owners, layer.world)

        take_from_rank0(local, mesh, scatter)
    sites.replace(full, as_parameter(local, shard, requires_grad=full.requires_grad))


def size_up(
    found: Sequence[ExpertsModule], layers: Sequence[Layer], dtype: torch.dtype | None, *, rematerialize: bool = False
) -> None:
    """Tell each layer an expert's bytes and FLOPs per row; rematerialized replicas are gathered once more."""
    for experts, layer in zip(found, layers, strict=True):
        wholes = [parameters_of(experts.store)[key] for key in experts.parameters]
        shapes = [
            shard.by_expert(p).shape[1:] for p in wholes if p is not None and is_expert_shard(shard := shard_of(p))
        ]
        layer.dtype = dtype or next(iter(experts.store.parameters(recurse=False))).dtype
        layer.placer.sizes = LayerSizes(
            row_flops=sum(2 * shape.numel() for shape in shapes if len(shape) == 2),
            row_bytes=layer.sizes.row_bytes,
            expert_bytes=sum(shape.numel() for shape in shapes) * layer.dtype.itemsize,
            expert_transfers=3 if rematerialize else 2,
        )


def count_dense(model: torch.nn.Module) -> int:
    """Count elements of whole dense matrices in numbered blocks: these compute between MoE layers."""
    count = 0
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        if parameter.ndim == 2 and (shard is None or shard.part != "experts") and re.search(r"(^|\.)\d+\.", name):
            # Of a DTensor a rank computes its part.
            count += shard.full_shape.numel() if shard is not None else collectives.part_of(parameter).numel()
    return count
