"""Load optimizer state that was saved whole, by a plain loop or DistributedDataParallel, into one of shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hecate.checkpoints.coordination import MismatchError
from hecate.checkpoints.optimizer_tensors import as_optimizers
from hecate.checkpoints.state_dicts import sites_of, whole_shape
from hecate.training.optimizer_state import note_owners, noted, options_of
from hecate.wrap.shard import shard_of


def take_whole_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any], source: str) -> None:
    """Give ``optimizer``, on every rank, its part of ``state``, a whole optimizer's ``state_dict()`` from ``source``.

    Raise MismatchError, with nothing changed, if it is one rank's part or of other parameters.
    """
    (inner,) = as_optimizers(optimizer)
    _check(model, inner, state, source)
    taken: dict[nn.Parameter, dict[str, Any]] = {}
    for group, saved in zip(inner.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            taken[parameter] = {
                key: _part_of(value, parameter) for key, value in state["state"].get(number, {}).items()
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
    stacked = [site for site in sites_of(model) if site.members]
    if stacked:
        raise MismatchError(
            f"hecate: {source} was written without hecate. There each expert of a list has parameters of its own "
            f"({stacked[0].members[0]}), which are rows of {stacked[0].name} here. Load the weights alone, or go on "
            "without hecate."
        )
    found, wanted = ([len(group["params"]) for group in one] for one in (groups, optimizer.param_groups))
    if found != wanted:
        raise MismatchError(
            f"hecate: {source} has groups of {found} parameters, {name} of {wanted}: build it as it was built"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            shard, whole = shard_of(parameter), whole_shape(parameter)
            for key, value in state["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape != whole:
                    raise MismatchError(
                        f"hecate: {source}: {key} of parameter {number} has the shape {list(value.shape)}, and the "
                        f"parameter{'' if shard is None else ' ' + shard.name} {list(whole)}"
                    )


def _part_of(value: Any, parameter: nn.Parameter) -> Any:
    shard = shard_of(parameter)
    return shard.slice(value) if shard is not None and isinstance(value, torch.Tensor) and value.ndim else value
