"""LoRA on fused experts (PEFT's ``target_parameters``): the adapters of experts are experts, too.

PEFT parametrizes the experts module inside a forward, which no graph can have. Here its adapters become parameters of
that module, ``[E, r, in]`` and ``[E, out, r]``, sharded like all others, and reading the adapted parameter adds their
product. State dicts keep PEFT's names and shapes. Nothing here imports peft unless the user has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hecate.private import accumulation_hooks, gradient_hooks, is_transposed, parameters_of
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.swapped_class import swap_class

_ADAPTERS = "_hecate_adapters"
# For messages, of what PEFT would do with experts of which a rank has a part.
ADAPTERS_AFTERWARDS = (
    "Call get_peft_model before hecate.compile, and give a trainer the compiled model and no peft_config. TRL's "
    "DPOTrainer adds a second adapter as its reference unless it is given one: pass ref_model=, a second model into "
    "which the adapter is merged (merge_and_unload), or the base if the adapter is new; it may be compiled as well."
)


@dataclass(frozen=True, eq=False)
class ExpertAdapter:
    """The adapter of one parameter of an experts module."""

    wrapper: Any  # PEFT's module around the experts module; says whether adapters are switched off
    name: str
    path: str
    # Keys of ``[E, r, in]`` and ``[E, out, r]`` in the experts module.
    down: str
    up: str
    transposed: bool  # the parameter is [E, in, out]

    @property
    def kinds(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The keys, each after PEFT's name of the adapter's half."""
        return ("lora_A", self.down), ("lora_B", self.up)

    @property
    def is_active(self) -> bool:
        return not self.wrapper.disable_adapters and self.name in self.wrapper.active_adapters

    def add_to(self, parameter: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product = torch.bmm(up, down) * self.wrapper.scaling[self.name]
        return parameter + (product.transpose(1, 2) if self.transposed else product)


def adapter_of(module: nn.Module, key: str) -> ExpertAdapter | None:
    """Return the adapter of a parameter; None if it has none."""
    found: dict[str, ExpertAdapter] = module.__dict__.get(_ADAPTERS, {})
    return found.get(key)


def has_adapters_of_experts(module: nn.Module) -> bool:
    """Return whether a module of experts has adapters that its parameters are read with."""
    return _ADAPTERS in module.__dict__


def adopt_adapters(model: nn.Module, found: Sequence[ExpertsModule]) -> list[ExpertsModule]:
    """Make adapters parameters of the modules in ``found``, and return these; ValueError for several or merged."""
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    if layers is None or not hasattr(layers, "ParamWrapper"):
        return list(found)
    by_module = {id(experts.module): experts for experts in found}
    wrappers: list[tuple[Any, nn.Module]] = []
    for name, wrapper in model.named_modules():
        if isinstance(wrapper, layers.ParamWrapper):
            inner = wrapper.get_base_layer()
            experts = by_module.get(id(inner))
            if experts is not None and wrapper.parameter_name in experts.parameters:
                _check_one_adapter(name, wrapper)
                wrappers.append((wrapper, inner))
    for wrapper, inner in wrappers:
        experts = by_module[id(inner)]
        keys = _adopt(wrapper, experts)
        by_module[id(inner)] = replace(experts, parameters=(*experts.parameters, *keys))
        swap_class(wrapper, {"forward": _forward, "update_layer": _refuse_second})
        # What it is around, by which the base is frozen, and not this adapter, which is in there now.
        base = wrapper.base_layer
        base.__dict__["requires_grad_"] = _requires_grad_without_outer(base, inner)
    return [by_module[id(experts.module)] for experts in found]


def _check_one_adapter(name: str, wrapper: Any) -> None:
    adapters = list(wrapper.lora_A)
    if wrapper.num_experts == 1:
        raise ValueError(
            f"hecate.compile: {name} has an adapter on the experts' {wrapper.parameter_name}, which is no matrix for "
            "each expert. Leave it out of target_parameters."
        )
    if len(adapters) != 1 or wrapper.merged:
        what = "it is merged" if wrapper.merged else ", ".join(adapters)
        raise ValueError(
            f"hecate.compile: {name} has adapters on the experts' {wrapper.parameter_name} ({what}). Experts can "
            "have one adapter that is not merged: delete or merge the others first, and unmerge this one."
        )
    for kind in ("lora_A", "lora_B"):
        weight = getattr(wrapper, kind)[adapters[0]].weight
        if gradient_hooks(weight) or accumulation_hooks(weight):
            raise ValueError(
                f"hecate.compile: {name}.{kind}.{adapters[0]}.weight has a gradient hook, and each rank keeps the "
                "adapters of its own experts in another shape. Register it after hecate.compile, on what "
                "model.named_parameters() has then."
            )


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    # The parameter is adapted where it is read.
    return self.base_layer(*args, **kwargs)


def _refuse_second(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"hecate: a second adapter {adapter_name!r} on the experts' {self.parameter_name}, after hecate.compile. "
        f"Experts have one adapter, here {next(iter(self.lora_A))!r}. {ADAPTERS_AFTERWARDS}"
    )


def _adopt(wrapper: Any, experts: ExpertsModule) -> tuple[str, str]:
    key, (adapter,), inner = wrapper.parameter_name, wrapper.lora_A, experts.module
    path = next(f"{name}." for name, module in wrapper.named_modules() if module is inner)
    down, up = f"{key}_lora_A", f"{key}_lora_B"
    record = ExpertAdapter(wrapper, adapter, path, down, up, transposed=is_transposed(wrapper))
    with torch.no_grad():
        for kind, own in record.kinds:
            linear = getattr(wrapper, kind)[adapter]
            weight = _split(kind, linear.weight.detach(), experts.num_experts)
            weight = weight.clone(memory_format=torch.contiguous_format)
            parameters_of(inner)[own] = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
            parameters_of(linear)["weight"] = None
            for module, name in ((linear, "weight"), (getattr(wrapper, kind), f"{adapter}.weight")):
                # By these PEFT freezes and thaws it, in ``set_adapter`` and around ``disable_adapter``.
                module.__dict__["named_parameters"] = _named_parameters(inner, own, name)
    inner.__dict__.setdefault(_ADAPTERS, {})[key] = record
    _load_by_old_names(record, experts.num_experts)
    return down, up


def _named_parameters(inner: nn.Module, key: str, name: str) -> Callable[..., Iterator[tuple[str, nn.Parameter]]]:
    """Return what yields an adapter by a module that had its weight, under its ``name`` there."""

    def named_parameters(
        prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        parameter = parameters_of(inner)[key]
        assert parameter is not None
        yield f"{prefix}.{name}".lstrip("."), parameter

    return named_parameters


def _requires_grad_without_outer(module: nn.Module, inner: nn.Module) -> Callable[[bool], nn.Module]:
    """Return what freezes and thaws a module around ``inner``, but for adapters of wrappers around the module."""

    def requires_grad_(requires_grad: bool = True) -> nn.Module:
        within, own = {*module.modules()}, parameters_of(inner)
        outer = [record for record in inner.__dict__[_ADAPTERS].values() if record.wrapper not in within]
        others = {id(own[key]) for record in outer for _, key in record.kinds}
        for parameter in module.parameters():
            if id(parameter) not in others:
                parameter.requires_grad_(requires_grad)
        return module

    return requires_grad_


# PEFT's shapes: [E r, in], expert by expert; [out, r E], with the experts as the last of the two.
def _split(kind: str, weight: torch.Tensor, size: int) -> torch.Tensor:
    if kind == "lora_A":
        return weight.reshape(size, -1, weight.shape[1])
    return weight.reshape(weight.shape[0], -1, size).permute(2, 0, 1)


def _join(kind: str, weight: torch.Tensor) -> torch.Tensor:
    if kind == "lora_A":
        return weight.reshape(-1, weight.shape[2])
    return weight.permute(1, 2, 0).reshape(weight.shape[1], -1)


def save_adapters_by_old_names(found: Sequence[ExpertsModule]) -> None:
    """Show adapters in state dicts as PEFT does. To be called after the hooks that make them whole are registered."""
    for experts in found:
        for record in experts.module.__dict__.get(_ADAPTERS, {}).values():
            _save_by_old_names(record)


def _save_by_old_names(record: ExpertAdapter) -> None:
    def join(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for kind, key in record.kinds:
            whole = state.pop(prefix + record.path + key, None)
            if whole is not None:
                state[f"{prefix}{kind}.{record.name}.weight"] = _join(kind, whole).clone()

    record.wrapper.register_state_dict_post_hook(join)


def _load_by_old_names(record: ExpertAdapter, size: int) -> None:
    def split(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for kind, key in record.kinds:
            old = f"{prefix}{kind}.{record.name}.weight"
            if old in state:
                state[prefix + record.path + key] = _split(kind, state.pop(old), size)

    record.wrapper.register_load_state_dict_pre_hook(split)
