"""Optimizer state of experts in a list, which have parameters of their own: all of an expert's is on its owner."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import gather_json
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state.layer import Layer
from hecate.wrap.expert_shards import MemberShard

State = MutableMapping[torch.Tensor, Any]
_Members = Sequence[tuple[nn.Parameter, MemberShard]]


def move_members(state: State, members: _Members, layer: Layer, old: Owners) -> None:
    """Bring the state of experts from their ``old`` owners to those of ``layer``. A collective.

    ``members`` are parameters of the layer's experts, in the same order on all ranks.
    """
    world, new = layer.world, layer.owners
    moving = [
        (number, parameter, old.ranks[shard.expert], new.ranks[shard.expert])
        for number, (parameter, shard) in enumerate(members)
        if old.ranks[shard.expert] != new.ranks[shard.expert]
    ]
    told = _tell(
        [(number, parameter) for number, parameter, source, _ in moving if source == world.rank], state, world
    )
    leaving: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
    coming = [0] * world.size
    for number, parameter, source, target in moving:
        for key, one in _tensors(told.get(number, {})):
            if source == world.rank:
                leaving[target].append(_as_bytes(state[parameter][key], world.device))
            if target == world.rank:
                coming[source] += one.bytes
    nothing = torch.empty(0, dtype=torch.uint8, device=world.device)
    going = [torch.cat([nothing, *parts]) for parts in leaving]
    received = collectives.all_to_all(torch.cat(going), [len(part) for part in going], coming, world)
    from_rank = list(received.split(coming))
    for number, parameter, source, target in moving:
        state.pop(parameter, None)
        if target != world.rank or not told.get(number):
            continue
        found: dict[str, Any] = {key: value for key, value in told[number].items() if not isinstance(value, list)}
        for key, one in _tensors(told[number]):
            found[key] = one.read(from_rank[source])
            from_rank[source] = from_rank[source][one.bytes :]
        state[parameter] = found


def gather_members(state: State, members: _Members, world: World) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the state of all experts, each of them whole, on every rank. A collective."""
    told = _tell([(number, p) for number, (p, shard) in enumerate(members) if shard.owned], state, world)
    whole: dict[nn.Parameter, dict[str, Any]] = {}
    for number, (parameter, shard) in enumerate(members):
        found = {key: value for key, value in told.get(number, {}).items() if not isinstance(value, list)}
        for key, one in _tensors(told.get(number, {})):
            mine = state[parameter][key] if shard.owned else torch.empty(0, device=world.device)
            row = _as_bytes(mine, world.device).reshape(int(shard.owned), one.bytes)
            found[key] = one.read(shard.from_owner(row))
        if found:
            whole[parameter] = found
    return whole


@dataclass(frozen=True)
class _Tensor:
    """A tensor that another rank has."""

    dtype: torch.dtype
    shape: torch.Size
    on_host: bool

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self, raw: torch.Tensor) -> torch.Tensor:
        # Memory of its own, which begins where numbers of any size may.
        found = raw[: self.bytes].clone().view(self.dtype).reshape(self.shape)
        return found.cpu() if self.on_host else found


def _as_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def _tensors(told: dict[str, Any]) -> list[tuple[str, _Tensor]]:
    """Return the tensors in what was told of a state, in an order that is the same on all ranks."""
    return [
        (key, _Tensor(getattr(torch, value[0]), torch.Size(value[1]), value[2]))
        for key, value in sorted(told.items())
        if isinstance(value, list)
    ]


def _tell(own: Sequence[tuple[int, nn.Parameter]], state: State, world: World) -> dict[int, dict[str, Any]]:
    """Tell all ranks what state numbered parameters have here: values, and dtypes and shapes of tensors."""
    mine = {
        number: {
            key: [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type == "cpu"]
            if isinstance(value, torch.Tensor)
            else value
            for key, value in state.get(parameter, {}).items()
        }
        for number, parameter in own
    }
    # JSON makes texts of numbers.
    return {int(number): told for theirs in gather_json(mine, world) for number, told in theirs.items()}
