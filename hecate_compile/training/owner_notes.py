"""Notes in parameter groups: of which rank their state is, and who owned their experts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state.layer import Layer
from hecate.wrap.expert_shards import ExpertShard, MemberShard, is_expert_shard, is_member_shard
from hecate.wrap.shard import shard_of

# The key in a parameter group under which rank and owners stand as JSON: text survives every kind of checkpoint.
NOTE = "hecate_state"


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options, without its parameters and Hecate's note."""
    return {key: value for key, value in group.items() if key not in ("params", NOTE)}


def noted(group: dict[str, Any]) -> bool:
    return NOTE in group


def note_owners(optimizer: Optimizer) -> None:
    """Note that the state of ``optimizer`` is laid out for the present owners."""
    for group in optimizer.param_groups:
        world = world_in(group)
        if world is not None:
            group[NOTE] = as_text(world, layers_in(group))


def world_of(optimizer: Optimizer) -> World | None:
    """Return the group in which parameters of ``optimizer`` are sharded; None if none are, or it has one rank."""
    worlds = (world_in(group) for group in optimizer.param_groups)
    return next((world for world in worlds if world is not None), None)


def world_in(group: dict[str, Any]) -> World | None:
    shards = (shard_of(parameter) for parameter in group["params"])
    return next((shard.world for shard in shards if shard is not None and shard.world.group is not None), None)


def expert_shards_in(group: dict[str, Any]) -> Iterator[tuple[nn.Parameter, ExpertShard | MemberShard]]:
    for parameter in group["params"]:
        shard = shard_of(parameter)
        if (is_expert_shard(shard) or is_member_shard(shard)) and shard.world.group is not None:
            yield parameter, shard


def layers_in(group: dict[str, Any]) -> list[Layer]:
    return list({shard.layer.id: shard.layer for _, shard in expert_shards_in(group)}.values())


def as_text(world: World, layers: Iterable[Layer]) -> str:
    owners = {layer.name: layer.owners.ranks for layer in layers}
    return json.dumps({"rank": world.rank, "ranks": world.size, "owners": owners})


def noted_owners(group: dict[str, Any], layer: Layer) -> Owners:
    noted: dict[str, Sequence[int]] = json.loads(group[NOTE])["owners"] if NOTE in group else {}
    owners = Owners(tuple(noted.get(layer.name, layer.owners.ranks)), layer.world.size)
    if owners.num_experts != layer.num_experts:
        raise ValueError(
            f"hecate: optimizer state of {layer.name} was saved for {owners.num_experts} experts, "
            f"the model has {layer.num_experts}"
        )
    return owners
