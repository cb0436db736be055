"""Make optimizer state follow its experts, for any optimizer, no matter who built it.

Each parameter group notes which rank's state it is, and the owners of its experts. Right before an optimizer's next
step its state moves to where its experts went, also if it was saved under other owners.
"""

from __future__ import annotations

import functools
import gc
import json
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hecate.runtime.comm.history import doing
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.settle import settle_all
from hecate.training.member_state import gather_members, move_members
from hecate.training.optimizer_trial import ELEMENTWISE, refuse_unfit
from hecate.training.owner_notes import (
    NOTE,
    as_text,
    expert_shards_in,
    layers_in,
    note_owners,
    noted_owners,
    options_of,
    world_in,
    world_of,
)
from hecate.training.state_layout import by_row, in_other_forms, is_for_all, lines_per_row, on_rows
from hecate.wrap.expert_shards import ExpertShard, MemberShard, is_expert_shard, is_member_shard
from hecate.wrap.graph_breaks import called_by
from hecate.wrap.shard import shard_of

# The module of DCP's get_state_dict and set_state_dict.
_DCP = "torch.distributed.checkpoint.state_dict"

_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_asked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unequal: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # Ranks have their state in other forms.
_hooks: list[Any] = []


def watch_optimizers() -> None:
    """Hook into every optimizer's step, to count it and to bring its state along. Further calls change nothing."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
        # No hook tells that an optimizer is made.
        of_all: Any = Optimizer
        of_all.add_param_group = _noting(Optimizer.add_param_group)


def _noting(add: Callable[[Optimizer, dict[str, Any]], None]) -> Callable[[Optimizer, dict[str, Any]], None]:
    """Return what adds a parameter group as ``add`` does, and notes the owners of its experts.

    Adagrad and its kin have state from the start, and owners may change before their first step.
    """

    @functools.wraps(add)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        # One that comes from another optimizer has that one's note.
        group = self.param_groups[-1]
        world = world_in(group)
        if world is not None:
            group[NOTE] = as_text(world, layers_in(group))

    return add_param_group


def state_that_cannot_move(layers: Collection[int]) -> list[str]:
    """Return the names of living optimizers' state, of experts in ``layers``, without one line per expert."""
    # Garbage lives on until it is collected, at another time on every rank.
    gc.collect()
    return [
        f"{type(optimizer).__name__}'s {key!r}"
        for optimizer in list(_stepped)
        for group in optimizer.param_groups
        for parameter, shard in expert_shards_in(group)
        if shard.layer.id in layers
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if optimizer in _unequal or not _can_move(key, value, parameter, shard, noted_owners(group, shard.layer))
    ]


def state_that_cannot_be_saved(optimizer: Optimizer) -> str | None:
    """Return why a checkpoint cannot have an optimizer's state, and what to do; None if it can. A collective."""
    world = world_of(optimizer)
    name = None if world is None or type(optimizer) in ELEMENTWISE else in_other_forms(optimizer, world)
    if name is not None:
        _unequal.add(optimizer)
        return _cannot_save(optimizer, f"state of {name} is in eight bits on some ranks, and not on others,")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shard = shard_of(parameter)
            shared = shard is not None and shard.world.group is not None
            split = shared and not is_member_shard(shard)
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    wrong = type(value) not in (torch.Tensor, nn.Parameter, DTensor)
                    stays_whole = not split or is_for_all(key, value)
                    wrong = wrong or not (stays_whole or lines_per_row(key, value.shape, parameter.shape) is not None)
                else:
                    wrong = shared and not isinstance(value, (int, float, str, type(None)))
                if wrong:
                    name = shard.name if shard is not None else f"a parameter of the shape {list(parameter.shape)}"
                    what = f"a {type(value).__name__}" + (f" {list(value.shape)}" if torch.is_tensor(value) else "")
                    return _cannot_save(optimizer, f"{key!r} of {name} is {what},")
    return None


def _cannot_save(optimizer: Optimizer, what: str) -> str:
    return (
        f"{type(optimizer).__name__}'s {what} which hecate.save cannot write for any number of ranks; training is "
        "right. Save hecate.save(directory, model, step=step) without the optimizer, and on every rank "
        "optimizer.state_dict() in a file of its own, which the same rank of as many loads, with "
        "hecate.Config(reshard_every=0); or take an optimizer whose state is plain tensors like the parameters, such "
        'as AdamW. State of bitsandbytes can be saved where the elements of each expert, and with dense="shard" of '
        "each row, are a multiple of 256."
    )


def bring_along(optimizer: Optimizer) -> None:
    """Bring state to where its experts went. A collective if owners changed since the last step."""
    for group in optimizer.param_groups:
        world = world_in(group)
        if world is not None and NOTE in group:
            _check_rank(optimizer, group, world)
            _follow(optimizer, group, world)


@contextmanager
def stepping_does_not_count(optimizer: Optimizer) -> Iterator[None]:
    """Leave steps in the block, which only make state, out of the count after which experts move."""
    models = [layer.placer.model for group in optimizer.param_groups for layer in layers_in(group)]
    before = [model.optimizer_stepped for model in models]
    yield
    for model, stepped in zip(models, before, strict=True):
        model.optimizer_stepped = stepped


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # An optimizer step that is compiled itself counts no steps, so its experts stay where they are.
    if torch.compiler.is_compiling():
        return
    # This raises for a step that was refused, which has left NaN in all gradients, in those of dense parameters too.
    settle_all()
    world = world_of(optimizer)
    if world is None:
        return
    if optimizer not in _tried:
        refuse_unfit(optimizer, world, args[1:], kwargs)
        _tried.add(optimizer)
        _show_whole(optimizer)
    bring_along(optimizer)
    _leave_out_others(optimizer)


def _leave_out_others(optimizer: Optimizer) -> None:
    """Take the empty gradients away from experts of a list that other ranks own: an optimizer passes these over."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None and not parameter.numel() and is_member_shard(shard_of(parameter)):
            parameter.grad = None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        world = world_in(group)
        if world is None:
            continue
        layers = layers_in(group)
        for layer in layers:
            layer.placer.model.optimizer_stepped = True
        if any(layer.placer.model.policy.reshard_every for layer in layers):
            _stepped.add(optimizer)
        if NOTE not in group:
            group[NOTE] = as_text(world, layers)
    world = world_of(optimizer)
    if world is not None and optimizer not in _asked:
        _asked.add(optimizer)
        # Told now, since the first save may be hours later.
        problem = state_that_cannot_be_saved(optimizer)
        if problem is not None:
            warn_together(f"hecate: {problem}", world.everyone.rank, stacklevel=3)


def _show_whole(optimizer: Optimizer) -> None:
    """Show whole tensors to ``torch.distributed.checkpoint``'s functions, which keep one for each parameter."""
    optimizer.register_state_dict_post_hook(_gather_for_dcp)
    optimizer.register_load_state_dict_pre_hook(_slice_from_dcp)
    optimizer.register_load_state_dict_post_hook(_note_if_sliced)


def _numbered(optimizer: Optimizer) -> dict[int, nn.Parameter]:
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def _gather_for_dcp(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Gather the state of shards in a state dict, if DCP asks. A collective then."""
    if not called_by(_DCP):
        return None
    state, parameters = dict(state_dict["state"]), _numbered(optimizer)
    members = [(p, shard) for p in parameters.values() if is_member_shard(shard := shard_of(p))]
    with doing("get_optimizer_state_dict"), torch.no_grad():
        if members and members[0][1].world.group is not None:
            theirs = gather_members(optimizer.state, members, members[0][1].world)
            state.update((number, theirs[p]) for number, p in parameters.items() if p in theirs)
        for number in sorted(state):
            parameter = parameters[number]
            shard = shard_of(parameter)
            if shard is not None and shard.world.group is not None and not is_member_shard(shard):
                state[number] = {
                    key: on_rows(key, value, parameter.shape, shard.gather)
                    for key, value in sorted(state[number].items())
                }
    groups = [{"params": group["params"], **options_of(group)} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _slice_from_dcp(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    if not called_by(_DCP):
        return None
    # Numbers, or names in the order of the numbers.
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    state, parameters = dict(state_dict["state"]), _numbered(optimizer)
    for number, name in enumerate(names):
        shard = shard_of(parameters[number])
        if is_member_shard(shard):
            if not shard.owned:
                state.pop(name, None)
        elif shard is not None and shard.world.group is not None and name in state:
            state[name] = {
                key: on_rows(key, value, shard.full_shape, shard.slice) for key, value in state[name].items()
            }
    return {**state_dict, "state": state}


def _note_if_sliced(optimizer: Optimizer) -> None:
    # State that DCP loads has no note, and was sliced for the present owners.
    if any(NOTE not in group for group in optimizer.param_groups):
        note_owners(optimizer)


def _check_rank(optimizer: Optimizer, group: dict[str, Any], world: World) -> None:
    """Refuse state that is not this rank's own: ranks have other experts and rows."""
    noted = json.loads(group[NOTE])
    if (noted["rank"], noted["ranks"]) != (world.rank, world.size):
        where = "" if world.everyone is world else " in its group"
        raise RuntimeError(
            f"hecate: {type(optimizer).__name__} has the state of rank {noted['rank']} of {noted['ranks']}, and this "
            f"is rank {world.rank} of {world.size}{where}. Each rank has the state of its own experts and rows: save "
            "optimizer.state_dict() on every rank, in a file of its own, and load it on the same rank."
        )


def _follow(optimizer: Optimizer, group: dict[str, Any], world: World) -> None:
    """Bring a group's state from the owners in its note to the present ones. A collective if they changed."""
    text = as_text(world, layers_in(group))
    if text == group[NOTE]:
        return
    members: dict[Layer, list[tuple[nn.Parameter, MemberShard]]] = {}
    with torch.no_grad():
        for parameter, shard in expert_shards_in(group):
            old = noted_owners(group, shard.layer)
            if old == shard.layer.owners:
                continue
            if is_member_shard(shard):
                members.setdefault(shard.layer, []).append((parameter, shard))
            elif is_expert_shard(shard):
                _move(optimizer, parameter, shard, old)
        for layer, theirs in members.items():
            move_members(optimizer.state, theirs, layer, noted_owners(group, layer))
    group[NOTE] = text


def _move(optimizer: Optimizer, parameter: nn.Parameter, shard: ExpertShard, old: Owners) -> None:
    state, layer = optimizer.state.get(parameter, {}), shard.layer
    for key, value in sorted(state.items()):
        if not _can_move(key, value, parameter, shard, old):
            raise ValueError(
                f"hecate: {type(optimizer).__name__}'s {key!r} of {shard.name} was made or saved under other "
                "owners of the experts, and cannot follow them: it has no line for each expert"
            )
        if isinstance(value, torch.Tensor) and not is_for_all(key, value):
            rows = _by_row(key, value, parameter, old.counts[layer.world.rank] * shard.lines)
            assert rows is not None
            moved = shard.moved(rows, old, layer.owners)
            state[key] = moved if rows is value else moved.flatten()


def _can_move(
    key: str, value: Any, parameter: nn.Parameter, shard: ExpertShard | MemberShard, owners: Owners
) -> bool:
    """Return whether a value is for all experts, or has a line for each of this rank's under ``owners``."""
    if isinstance(value, torch.Tensor):
        # What belongs to one expert can be of any shape.
        if not is_expert_shard(shard):
            return type(value) is torch.Tensor
        mine = owners.counts[shard.world.rank] * shard.lines
        return is_for_all(key, value) or _by_row(key, value, parameter, mine) is not None
    return value is None or isinstance(value, (int, float, str))


def _by_row(key: str, value: torch.Tensor, parameter: nn.Parameter, rows: int) -> torch.Tensor | None:
    if value.ndim == parameter.ndim and len(value) == rows:
        return value
    return by_row(key, value, (rows, *parameter.shape[1:]))
