"""Full tensors in ``state_dict``: shards of any kind are gathered into them and sliced out of them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hecate.private import parameters_of
from hecate.runtime.comm.agreement import meet
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.world import World
from hecate.wrap.carry_over import ParameterSites
from hecate.wrap.expert_shards import is_member_shard
from hecate.wrap.shard import Shard, as_parameter, no_longer_the_shard, shard_of

Site = tuple[nn.Module, str]


def keep_state_dicts_full(model: nn.Module, sites: ParameterSites, world: World) -> None:
    """Make ``state_dict`` and ``load_state_dict``, collectives then, show and take full tensors by the old names."""
    gathered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
    for module in model.modules():
        hangs = {
            key: sites.of(parameter)
            for key, parameter in parameters_of(module).items()
            # An expert of a list is shown by its list.
            if parameter is not None and (shard := shard_of(parameter)) is not None and not is_member_shard(shard)
        }
        if hangs:
            _keep_full(module, hangs, gathered)
    if world.group is not None:
        model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: _meet(world))


def _meet(world: World) -> None:
    assert world.group is not None
    world.queue.drain()
    meet("state_dict", world.group)


def _keep_full(
    module: nn.Module, hangs: dict[str, list[Site]], gathered: weakref.WeakValueDictionary[int, torch.Tensor]
) -> None:
    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key, sites in hangs.items():
            parameter = state.get(prefix + key)
            if parameter is None:
                continue
            shard = _shard_at(module, prefix, key)
            full = gathered.get(id(shard)) if len(sites) > 1 else None
            # A tensor that was gathered for an earlier state dict may be out of date.
            if full is None or not any(value is full for value in state.values()):
                with doing("state_dict"):
                    full = gathered[id(shard)] = shard.gather(parameter.detach())
            state[prefix + key] = full

    def slice(
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for key, ((first, first_key), *_) in hangs.items():
            current, full = parameters_of(module)[key], state.get(prefix + key)
            if full is None or current is None:
                continue
            shard = _shard_at(module, prefix, key)
            if tuple(full.shape) != tuple(shard.full_shape):
                errors.append(
                    f"{prefix + key}: the checkpoint has {list(full.shape)}, the model {list(shard.full_shape)}. "
                    f"hecate models load full tensors; every rank slices its {shard.part} itself."
                )
                del state[prefix + key]
                continue
            loaded = parameters_of(first)[first_key]
            if metadata.get("assign_to_params_buffers") and loaded is not current:
                # The first site of a tied parameter has its new shard already. A second one would train apart.
                state[prefix + key] = loaded
            else:
                local = shard.slice(full.detach())
                state[prefix + key] = as_parameter(local, shard, requires_grad=current.requires_grad)

    module.register_state_dict_post_hook(gather)
    module.register_load_state_dict_pre_hook(slice)


def _shard_at(module: nn.Module, prefix: str, key: str) -> Shard:
    shard = shard_of(parameters_of(module)[key])
    if shard is None:
        raise no_longer_the_shard(prefix + key)
    return shard
