"""Stack the parameters of experts that are modules of their own, in an ``nn.ModuleList`` or ``nn.ModuleDict``.

The list gets a parameter ``[E, ...]`` for every ``[...]`` of its members, which from then on read their expert of it:
``self.experts[e](rows)`` runs the same code on ``stacked[e]``. State dicts keep the old names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hecate.private import children_of, parameters_of
from hecate.wrap.carry_over import carry_over_stacked
from hecate.wrap.find_experts import ExpertsModule

_MEMBER = "_hecate_member"


@dataclass(frozen=True, eq=False)
class Member:
    """The place where the parameters of a module inside an expert are now."""

    holder: nn.Module  # the list
    expert: int  # which of its members the module is in
    keys: dict[str, str]  # the module's own key of each parameter, and that in the holder


def member_of(module: nn.Module) -> Member | None:
    """Return the record of a module inside an expert that was stacked; None for every other module."""
    found: Member | None = module.__dict__.get(_MEMBER)
    return found


def stack_experts(found: Sequence[ExpertsModule]) -> None:
    for experts in found:
        if not experts.members:
            continue
        for name, key in experts.names.items():
            parts = [member.get_parameter(name) for member in experts.members]
            with torch.no_grad():
                full = torch.stack([part.detach() for part in parts])
            stacked = nn.Parameter(full, requires_grad=parts[0].requires_grad)
            carry_over_stacked(parts, stacked)
            parameters_of(experts.module)[key] = stacked
            for index, member in enumerate(experts.members):
                path, _, own = name.rpartition(".")
                part = member.get_submodule(path)
                parameters_of(part)[own] = None
                record = part.__dict__.setdefault(_MEMBER, Member(experts.module, index, {}))
                record.keys[own] = key
        for index, member in enumerate(experts.members):
            _refuse_freezing(experts, index, member)
        _load_by_old_names(experts)


def _refuse_freezing(experts: ExpertsModule, index: int, member: nn.Module) -> None:
    """Make freezing and thawing of one expert raise: it has no parameters of its own any more to freeze."""

    def requires_grad_(requires_grad: bool = True) -> nn.Module:
        raise RuntimeError(
            f"hecate: expert {index} of {experts.name} cannot be frozen or trained on its own: hecate.compile has "
            f"made one parameter of all experts for each of {', '.join(experts.names)}. Call requires_grad_ on "
            f"{experts.name}, or clear the gradients of some experts after the backward."
        )

    for part in member.modules():
        if part.__dict__.get(_MEMBER) is not None or part is member:
            part.__dict__["requires_grad_"] = requires_grad_


def save_by_old_names(found: Sequence[ExpertsModule]) -> None:
    """Show members' parameters one by one in state dicts. To be called after the hooks that make them whole."""
    for experts in found:
        if experts.members:
            _save_by_old_names(experts)


def names_of_members(experts: ExpertsModule) -> dict[str, tuple[str, ...]]:
    """Return, by the key of each stacked parameter, the names in the list of its parts, expert by expert."""
    return {key: tuple(f"{label}.{name}" for label in _labels(experts)) for name, key in experts.names.items()}


def _labels(experts: ExpertsModule) -> list[str]:
    members = set(experts.members)
    return [label for label, module in children_of(experts.module).items() if module in members]


def _save_by_old_names(experts: ExpertsModule) -> None:
    names, labels = experts.names, _labels(experts)

    def split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        whole = {name: state.pop(prefix + key, None) for name, key in names.items()}
        for index, label in enumerate(labels):
            for name, full in whole.items():
                if full is not None:
                    # Memory of its own: files of tensors want no views.
                    state[f"{prefix}{label}.{name}"] = full[index].clone()

    experts.module.register_state_dict_post_hook(split)


def _load_by_old_names(experts: ExpertsModule) -> None:
    names, labels = experts.names, _labels(experts)

    def stack(
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for name, key in names.items():
            old = [f"{prefix}{label}.{name}" for label in labels]
            absent = [one for one in old if one not in state]
            there = [state.pop(one) for one in old if one in state]
            shapes = sorted({tuple(part.shape) for part in there})
            missing.extend(absent)
            if absent and there:
                # An error even where missing keys are allowed: one expert alone has no parameter to be loaded into.
                errors.append(f"{absent[0]} is not in the checkpoint, which has others. All are loaded, or none.")
            elif len(shapes) > 1:
                errors.append(f"{old[0]} and its kin have different shapes {shapes}.")
            elif there:
                state[prefix + key] = torch.stack(there)

    experts.module.register_load_state_dict_pre_hook(stack)
