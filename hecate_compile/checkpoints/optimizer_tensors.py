"""An optimizer's state as tensors for ``torch.distributed.checkpoint``, by parameter names, and from a whole one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hecate.checkpoints.coordination import MismatchError
from hecate.checkpoints.state_dicts import LogicalTensor, Site, sites_of, whole_shape
from hecate.private import init_optimizer_state
from hecate.runtime.comm.agreement import gather_json
from hecate.training.optimizer_state import bring_along, state_that_cannot_be_saved, stepping_does_not_count
from hecate.training.owner_notes import note_owners, noted, options_of, world_of
from hecate.training.state_layout import is_for_all, is_scale, is_table, lines_per_row, on_rows
from hecate.wrap.expert_shards import is_member_shard
from hecate.wrap.shard import shard_of


def as_optimizers(given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return a list of the given optimizers, without wrappers such as accelerate's."""
    found = []
    for optimizer in [] if given is None else [given] if isinstance(given, Optimizer) else given:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        found.append(optimizer)
    return found


def optimizer_name(number: int) -> str:
    """Return the prefix of an optimizer's tensors; that of the first is what users of torch write."""
    return "optimizer" if number == 0 else f"optimizer{number}"


@dataclass
class OptimizerTensors:
    """An optimizer's state as tensors and plain data, each by parameter name (see :meth:`Site.split`), then key."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  # Options, and the names of parameters.


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> OptimizerTensors:
    """Return the state of ``optimizer``; tensors share its memory. A collective."""
    bring_along(optimizer)
    problem = state_that_cannot_be_saved(optimizer)
    if problem is not None:
        raise ValueError(problem)
    sites = _first_sites(model)
    out = OptimizerTensors(groups=_groups(optimizer, sites))
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        site = sites[id(parameter)]
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                out.tensors.setdefault(site.name, {})[key] = site.split(value, key)
            elif value is not None:
                out.plain.setdefault(site.name, {})[key] = value
    members = [site for site in sites.values() if is_member_shard(shard_of(site.parameter))]
    world = world_of(optimizer)
    if members and world is not None:
        own = {site.name: out.plain[site.name] for site in members if site.name in out.plain}
        for theirs in gather_json(own, world):
            out.plain.update(theirs)
    return out


def prepare_optimizer(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Mapping[str, TensorStorageMetadata]]
) -> OptimizerTensors:
    """Make room in ``optimizer`` for ``saved`` state, by parameter name and key; its own state is dropped."""
    sites = _first_sites(model)
    out = OptimizerTensors(groups=_groups(optimizer, sites))
    optimizer.state.clear()
    note_owners(optimizer)
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            site, shard, whole = sites[id(parameter)], shard_of(parameter), whole_shape(parameter)
            split = shard is not None and shard.world.group is not None and not is_member_shard(shard)
            for key, found in saved.get(site.name, {}).items() if site.is_here else ():
                lines = lines_per_row(key, found.size, whole) if split and found.size != whole else None
                shared = found.size == whole or lines is not None or not len(found.size) or is_table(key)
                if split and not shared:
                    raise ValueError(
                        f"{key} of {site.name} has the shape {list(found.size)}, and the parameter, which is "
                        f"split over ranks, {list(whole)}"
                    )
                if found.size == whole:
                    room = torch.zeros_like(parameter, dtype=found.properties.dtype, requires_grad=False)
                elif lines is not None:
                    room = torch.zeros(len(parameter) * lines, dtype=found.properties.dtype, device=parameter.device)
                else:
                    # The state is one value for the whole parameter: a count of steps.
                    device = parameter.device if on_device or key != "step" else torch.device("cpu")
                    room = torch.zeros(found.size, dtype=found.properties.dtype, device=device)
                optimizer.state[parameter][key] = room
                out.tensors.setdefault(site.name, {})[key] = site.split(room, key)
    return out


def set_plain(model: nn.Module, optimizer: Optimizer, plain: Mapping[str, Mapping[str, Any]]) -> None:
    """Give ``optimizer`` the part of its state that is no tensor."""
    sites = _first_sites(model)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        site = sites[id(parameter)]
        if site.is_here:
            optimizer.state[parameter].update(plain.get(site.name, {}))


def set_options(optimizer: Optimizer, groups: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Give each group the options that were saved, in ``groups``, with the parameters that ``own`` names for it."""
    for number, (group, mine) in enumerate(zip(optimizer.param_groups, own, strict=True)):
        # Groups may be in any order, since names tell them apart.
        match = [saved for saved in groups if set(saved["params"]) == set(mine["params"])]
        if not match:
            raise ValueError(_no_such_group(optimizer, number, mine["params"]))
        for key, value in match[0].items():
            if key == "params":
                continue
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, (torch.Tensor, float)):
                current.fill_(float(value))
            else:
                group[key] = value


def compare_groups(model: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[str]:
    """List why :func:`set_options` could not give ``optimizer`` the options of ``groups``, a line each."""
    try:
        own = _groups(optimizer, _first_sites(model))
    except ValueError as error:
        return [str(error)]
    known = [frozenset(group["params"]) for group in groups]
    return [
        _no_such_group(optimizer, number, group["params"])
        for number, group in enumerate(own)
        if frozenset(group["params"]) not in known
    ]


def _no_such_group(optimizer: Optimizer, number: int, names: list[str]) -> str:
    shown = f"{len(names)} parameters ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
    return (
        f"group {number} of {type(optimizer).__name__} has {shown}, and no group in the checkpoint has the same "
        "parameters. Build the optimizer as it was built when it was saved"
    )


def _first_sites(model: nn.Module) -> dict[int, Site]:
    sites: dict[int, Site] = {}
    for site in sites_of(model):
        sites.setdefault(id(site.parameter), site)
    return sites


def _groups(optimizer: Optimizer, sites: Mapping[int, Site]) -> list[dict[str, Any]]:
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        names: list[str] = []
        for parameter in group["params"]:
            if id(parameter) not in sites:
                raise ValueError(
                    f"{type(optimizer).__name__} has a parameter of the shape {list(parameter.shape)} in group "
                    f"{number} that is not in the model. Build it from model.parameters() after hecate.compile"
                )
            names.append(sites[id(parameter)].name)
        groups.append({"params": names, **options_of(group)})
    return groups


# --- for torch.distributed.checkpoint, without hecate.save ---


def get_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer`` for ``torch.distributed.checkpoint``, by names. All ranks call it together.

    An optimizer that has not stepped gets state to load into. ``torch.distributed.checkpoint.load`` fills tensors in
    place; then give the whole to :func:`set_optimizer_state_dict`.

    Returns:
        ``{"state": {name: {key: tensor or number}}, "param_groups": [{"params": names, ...options}]}``.

    Raises:
        ValueError: the optimizer has a parameter that the model has not, or state that cannot be split over ranks.
    """
    if not optimizer.state:
        with stepping_does_not_count(optimizer):
            init_optimizer_state(optimizer)
    found = optimizer_tensors(model, optimizer)
    state: dict[str, dict[str, Any]] = {name: dict(tensors) for name, tensors in found.tensors.items()}
    for name, plain in found.plain.items():
        state.setdefault(name, {}).update(plain)
    return {"state": state, "param_groups": found.groups}


def set_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Take what :func:`get_optimizer_state_dict` gave and ``torch.distributed.checkpoint.load`` filled.

    Raises:
        ValueError: the state is of another optimizer, or of other groups of parameters.
    """
    own = optimizer_tensors(model, optimizer)
    for name, tensors in own.tensors.items():
        for key, tensor in tensors.items():
            given = state_dict["state"].get(name, {}).get(key)
            if given is None:
                raise ValueError(f"hecate.set_optimizer_state_dict: no {key!r} of {name}")
            source, target = (one.part if isinstance(one, LogicalTensor) else one for one in (given, tensor))
            if isinstance(target, DTensor) or source.data_ptr() != target.data_ptr():
                target.copy_(source)
    plain = {
        name: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for name, state in state_dict["state"].items()
    }
    set_plain(model, optimizer, plain)
    set_options(optimizer, state_dict["param_groups"], own.groups)
    note_owners(optimizer)


def take_whole_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any], source: str) -> None:
    """Give ``optimizer``, on every rank, its part of ``state``, a whole optimizer's ``state_dict()`` from ``source``.

    Raise MismatchError, with nothing changed, if it is one rank's part or of other parameters.
    """
    (inner,) = as_optimizers(optimizer)
    _check(model, inner, state, source)
    taken: dict[nn.Parameter, dict[str, Any]] = {}
    for group, saved in zip(inner.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            shard = shard_of(parameter)
            if is_member_shard(shard) and not shard.owned:
                continue
            taken[parameter] = {
                key: value if shard is None else on_rows(key, value, shard.full_shape, shard.slice)
                for key, value in _flat(state["state"].get(number, {})).items()
            }
    # Torch's load_state_dict takes care of dtypes, devices and hooks. It numbers parameters group by group.
    numbers = {parameter: n for n, parameter in enumerate(p for group in inner.param_groups for p in group["params"])}
    groups = [
        {**options_of(saved), "params": [numbers[parameter] for parameter in group["params"]]}
        for group, saved in zip(inner.param_groups, state["param_groups"], strict=True)
    ]
    states = {numbers[parameter]: values for parameter, values in taken.items() if values}
    inner.load_state_dict({"state": states, "param_groups": groups})
    note_owners(inner)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state without the dict in which bitsandbytes hides some of it from FSDP."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def _check(model: nn.Module, optimizer: Optimizer, state: dict[str, Any], source: str) -> None:
    name, groups = type(optimizer).__name__, state.get("param_groups", [])
    if any(noted(group) for group in groups):
        raise MismatchError(
            f"hecate: {source} has one rank's part of the optimizer's state, as hecate's older versions left it. All "
            "ranks must see the folder hecate beside it; without that, load the weights by from_pretrained."
        )
    if "hecate" in state:
        raise MismatchError(
            f"hecate: {source} says that the optimizer's state is in the folder hecate beside it, and that is not "
            "there, or not on this rank. All ranks must see it."
        )
    found, wanted = ([len(group["params"]) for group in one] for one in (groups, optimizer.param_groups))
    if found != wanted:
        raise MismatchError(
            f"hecate: {source} has groups of {found} parameters, {name} of {wanted}: build it as it was built"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            shard, whole = shard_of(parameter), whole_shape(parameter)
            for key, value in _flat(state["state"].get(number, {})).items():
                if not isinstance(value, torch.Tensor) or is_for_all(key, value):
                    continue
                fits = lines_per_row(key, value.shape, whole) is not None
                if not fits and not (shard is None and is_scale(key)):
                    raise MismatchError(
                        f"hecate: {source}: {key} of parameter {number} has the shape {list(value.shape)}, and the "
                        f"parameter{'' if shard is None else ' ' + shard.name} {list(whole)}"
                    )
