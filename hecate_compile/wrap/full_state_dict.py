"""Full tensors in ``state_dict``: shards of any kind are gathered into them and sliced out of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hecate.private import parameters_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import meet
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.world import World
from hecate.wrap.carry_over import ParameterSites
from hecate.wrap.expert_shards import is_member_shard
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.shard import Shard, as_parameter, cannot_be_copied, no_longer_the_shard, note_shard, shard_of
from hecate.wrap.stack_experts import ExpertStack, stack_of

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
        model.register_state_dict_pre_hook(_Meeting(world))


class _Meeting:
    """A hook before ``state_dict``, where all ranks meet.

    It refuses to be pickled, as modules do whose parameters are sharded: a model's hooks are pickled before these.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        assert self._world.group is not None
        self._world.queue.drain()
        meet("state_dict", self._world.group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_copied("all ranks make its state dict together")


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
                    f"size mismatch for {prefix + key}: the checkpoint has {list(full.shape)}, the model "
                    f"{list(shard.full_shape)}. hecate models load full tensors; every rank slices its {shard.part} "
                    "itself."
                )
                # What is there stays, and is not missing.
                state[prefix + key] = current
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


def keep_lists_full(found: Sequence[ExpertsModule]) -> None:
    """Make state dicts of lists of experts, and of modules in them, show and take whole parameters."""
    for experts in found:
        stack = stack_of(experts)
        if stack is not None:
            _keep_list_full(experts.module, stack)


def _keep_list_full(experts: nn.Module, stack: ExpertStack) -> None:
    showing = False

    def begin(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        nonlocal showing
        showing = True

    def gather_all(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        nonlocal showing
        showing = False
        stack.tie()
        for key, name in stack.names.items():
            stacked, shard = stack.at(key)
            if shard.world.group is None or f"{prefix}{stack.labels[0]}.{name}" not in state:
                continue
            with doing("state_dict"):
                full = collectives.gather_shards(stacked.detach(), shard.layer.owners, shard.world)
            for expert, label in enumerate(stack.labels):
                # Memory of its own: files of tensors want no views.
                state[f"{prefix}{label}.{name}"] = full[expert].clone()

    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        # All experts are gathered together, unless the state dict is that of a module in the list.
        for name, parameter in parameters_of(module).items():
            record = shard_of(parameter)
            if not showing and parameter is not None and is_member_shard(record) and record.world.group is not None:
                with doing("state_dict"):
                    state[prefix + name] = record.gather(parameter.detach())

    def slice(
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for name, parameter in parameters_of(module).items():
            record, full = shard_of(parameter), state.get(prefix + name)
            if full is None or not is_member_shard(record):
                continue
            if full.shape != record.full_shape:
                errors.append(
                    f"size mismatch for {prefix + name}: the checkpoint has {list(full.shape)}, the model "
                    f"{list(record.full_shape)}."
                )
                # What is there stays, and is not missing.
                state[prefix + name] = parameter
                continue
            # A parameter, which may be put in the place of the old one.
            state[prefix + name] = own = nn.Parameter(record.slice(full.detach()), requires_grad=False)
            note_shard(own, record)

    experts.register_state_dict_pre_hook(begin)
    experts.register_state_dict_post_hook(gather_all)
    for module in dict.fromkeys(module for sites in stack.sites.values() for module, _ in sites):
        module.register_state_dict_post_hook(gather)
        module.register_load_state_dict_pre_hook(slice)


def _shard_at(module: nn.Module, prefix: str, key: str) -> Shard:
    shard = shard_of(parameters_of(module)[key])
    if shard is None:
        raise no_longer_the_shard(prefix + key)
    return shard
