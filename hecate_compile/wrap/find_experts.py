"""Find the modules that hold expert parameters, without hints from the user.

An experts module holds a floating-point parameter ``[E, a, b]``, one matrix per expert, or several ``[E * a, b]``, or
is a list of modules with the same parameters; since others look alike, a sign that says "experts" is asked for, too.
A wrong guess costs speed, never correctness: what is found is read through a gather unless a pass knows its use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from torch import nn

from hecate.private import children_of, parameters_of
from hecate.wrap.attention_config import config_value

# The attribute of a list of experts that has what graphs read for them (``stack_experts``).
STACK = "_hecate_stack"
_COUNT_ATTRIBUTES = (
    "num_experts",
    "n_experts",
    "moe_num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
)
_NAME = re.compile(r"expert|moe(?![a-z])|mixture", re.IGNORECASE)
_ROUTER = re.compile(r"router|(?<![a-z])gate(?!_)|wg$")


class NoExpertsError(ValueError):
    """The model has no module that looks like experts.

    Attributes:
        passed_over: modules that look similar, and why they are none.
    """

    def __init__(self, message: str, passed_over: Sequence[PassedOver] = ()) -> None:
        super().__init__(message)
        self.passed_over = tuple(passed_over)


@dataclass(frozen=True, kw_only=True)
class ExpertsModule:
    """A module whose parameters are split by expert."""

    name: str  # qualified name in the model, "" for the model itself
    module: nn.Module
    parameters: tuple[str, ...]  # its own, with the expert dimension first, or rows expert by expert
    num_experts: int
    sign: str  # why it was taken for experts
    folded: bool = False  # parameters are ``[E * a, b]``
    # The experts, if they are modules of a list; ``parameters`` are then made of theirs (``stack_experts``).
    members: tuple[nn.Module, ...] = ()
    names: dict[str, str] = field(default_factory=dict)  # of each parameter in a member: the key made of it

    @property
    def store(self) -> nn.Module:
        """The module that has ``parameters``: the stack of a list, once there is one."""
        store: nn.Module = self.module.__dict__.get(STACK, self.module)
        return store


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A module with parameters like those of experts that was not taken for experts, and why."""

    name: str
    reason: str


def find_experts(
    model: nn.Module, patterns: Sequence[str] | None = None
) -> tuple[list[ExpertsModule], list[PassedOver]]:
    """Return all experts modules of ``model`` in module order, and the modules that were passed over.

    ``fnmatch`` patterns of module names decide alone, if given. Raises NoExpertsError if nothing is found or a
    pattern matches nothing usable, and ValueError if a module shares parameters with two others that share none.
    """
    found: list[ExpertsModule] = []
    passed_over: list[PassedOver] = []
    for name, module in model.named_modules():
        chosen = patterns is not None and any(fnmatch(name, pattern) for pattern in patterns)
        if patterns is not None and not chosen:
            continue
        fused = _matrices(module)
        if not fused:
            around = model.get_submodule(name.rpartition(".")[0]) if name else None
            other = _listed_experts(name, module, around, chosen) or _folded_experts(name, module, chosen)
            if isinstance(other, ExpertsModule):
                found.append(other)
            elif other is not None:
                passed_over.append(other)
            fused = _matrices_in_groups(module) if other is None else {}
        if not fused:
            continue
        sizes = {parameter.shape[0] for parameter in fused.values()}
        if len(sizes) != 1:
            passed_over.append(PassedOver(name=name, reason=f"3-D parameters of different lengths {sorted(sizes)}"))
            continue
        num_experts = sizes.pop()
        sign = "named in Config(experts=...)" if chosen else _sign_of_experts(name, module, fused, num_experts)
        if sign is None:
            dims = next(iter(fused.values())).ndim
            passed_over.append(
                PassedOver(name=name, reason=f"{dims}-D parameters, but no router, name or count says experts")
            )
            continue
        keys = tuple(
            key
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.ndim >= 2 and parameter.shape[0] == num_experts and not _is_router(key, parameter, fused)
        )
        found.append(ExpertsModule(name=name, module=module, parameters=keys, num_experts=num_experts, sign=sign))
    # A list beside a router in which others are is one of layers.
    by_router = [one for one in found if one.members and one.sign.startswith("the router")]
    layers = [one for one in by_router if any(other.name.startswith(f"{one.name}.") for other in found)]
    found = [one for one in found if one not in layers]
    # A module around a list of experts is a router, also if it has a matrix for each of them.
    lists = [one for one in found if one.members] if patterns is None else []
    found = [one for one in found if one.members or not any(_is_around(one, other) for other in lists)]
    unmatched = [p for p in patterns or () if not any(fnmatch(experts.name, p) for experts in found)]
    if not found or unmatched:
        raise NoExpertsError(
            _nothing_found(model, unmatched if patterns is not None else None, passed_over), passed_over
        )
    _check_shared(found)
    return found, passed_over


def _is_around(one: ExpertsModule, other: ExpertsModule) -> bool:
    """Return whether a module with one matrix for each expert is around a list of as many, and so their router."""
    inside = other.name.startswith(f"{one.name}.".lstrip(".")) and one.num_experts == other.num_experts
    return inside and len(one.parameters) == 1


def _listed_experts(
    name: str, module: nn.Module, around: nn.Module | None, chosen: bool
) -> ExpertsModule | PassedOver | None:
    """Return the record of a list of experts, or of a list that looks like it; None for anything else."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(module) < 2:
        return None
    sign = "named in Config(experts=...)" if chosen else _sign_of_a_list(name, len(module), around)
    if sign is None:
        return None
    # A dictionary of experts may hold a dropout, too. An expert that stands twice shares parameters with itself.
    children = [m for m in children_of(module).values() if m is not None]
    members = tuple(m for m in children if next(m.parameters(), None) is not None)
    shapes = [[(key, p.shape, p.dtype) for key, p in m.named_parameters(remove_duplicate=False)] for m in members]
    if len(members) < 2 or any(other != shapes[0] for other in shapes[1:]):
        return PassedOver(name=name, reason="a list of modules whose parameters are not of the same names and shapes")
    if len({id(p) for m in members for p in m.parameters()}) != len(members) * len(shapes[0]):
        return PassedOver(name=name, reason="a list of modules that share parameters")
    if {len(shape) for _, shape, _ in shapes[0]} - {1, 2} or not any(len(shape) == 2 for _, shape, _ in shapes[0]):
        return PassedOver(name=name, reason="a list of modules that do not have matrices and vectors alone")
    if any(p.is_meta for p in module.parameters()):
        return PassedOver(name=name, reason="a list of experts on the meta device; build the model on the CPU")
    names = {key: key.replace(".", "_") for key, _, _ in shapes[0]}
    return ExpertsModule(
        name=name,
        module=module,
        parameters=tuple(names.values()),
        num_experts=len(members),
        sign=sign,
        members=members,
        names=names,
    )


def _sign_of_a_list(name: str, length: int, around: nn.Module | None) -> str | None:
    last = name.rpartition(".")[2]
    # "moe" does not count here: that may be a list of layers.
    if "expert" in last.lower():
        return f"the name {last}"
    beside = children_of(around) if around is not None else {}
    members = beside.get(last)
    widths = {size for p in members.parameters() for size in p.shape[1:]} if members is not None else set()
    for owner, module in beside.items():
        weight = getattr(module, "weight", None) if owner != last and _ROUTER.search(owner) else None
        sizes = list(weight.shape) if isinstance(weight, torch.Tensor) else []
        if len(sizes) == 2 and sizes[0] == length and sizes[1] in widths:
            return f"the router {owner}.weight {sizes}"
    return None


def _folded_experts(name: str, module: nn.Module, chosen: bool) -> ExpertsModule | None:
    """Return the record of a module that keeps all experts of a matrix in one, ``[E * a, b]``; None for any other.

    All of its matrices are between the same two widths, as those of an expert are. One alone may be a router, and a
    module around others that have parameters is a layer.
    """
    own = {
        key: p for key, p in parameters_of(module).items() if p is not None and p.ndim == 2 and p.is_floating_point()
    }
    says = chosen or any(_NAME.search(text) for text in (type(module).__name__, name.rpartition(".")[2]))
    around = any(next(child.parameters(), None) is not None for child in children_of(module).values() if child)
    if not says or around or len(own) < 2 or any(_ROUTER.search(key) for key in own):
        return None
    for attribute in _COUNT_ATTRIBUTES:
        count = getattr(module, attribute, None)
        if not isinstance(count, int) or count < 2 or any(len(p) % count or len(p) == count for p in own.values()):
            continue
        if len({frozenset((len(p) // count, p.shape[1])) for p in own.values()}) == 1:
            sign = f"{attribute} = {count}, by which {', '.join(own)} can be divided"
            keys = tuple(own)
            return ExpertsModule(name=name, module=module, parameters=keys, num_experts=count, sign=sign, folded=True)
    return None


def _check_shared(found: Sequence[ExpertsModule]) -> None:
    first: dict[int, str] = {}
    for experts in found:
        if experts.members:
            continue
        own = [id(parameters_of(experts.module)[key]) for key in experts.parameters]
        others = dict.fromkeys(first[p] for p in own if p in first)
        if len(others) > 1:
            raise ValueError(
                f"hecate.compile: {experts.name} shares expert parameters with {' and '.join(others)}, which "
                "share none with each other. Share all parameters of a module, or of one other module only."
            )
        for p in own:
            first.setdefault(p, next(iter(others), experts.name))


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters ``[E, a, b]``."""
    own = module.named_parameters(recurse=False)
    return {key: p for key, p in own if p.ndim == 3 and len(p) > 1 and p.is_floating_point()}


def _matrices_in_groups(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters ``[E, e, a, b]``, those of experts in groups. One alone is a convolution's."""
    own = module.named_parameters(recurse=False)
    found = {key: p for key, p in own if p.ndim == 4 and min(p.shape[:2]) > 1 and p.is_floating_point()}
    return found if len(found) > 1 and len({p.shape[:2] for p in found.values()}) == 1 else {}


def _sign_of_experts(name: str, module: nn.Module, fused: dict[str, nn.Parameter], num_experts: int) -> str | None:
    if type(module).__module__.startswith("torch.nn.modules"):
        return None
    for attribute in _COUNT_ATTRIBUTES:
        if getattr(module, attribute, None) == num_experts:
            return f"{attribute} = {num_experts}"
    for text in (type(module).__name__, name.rpartition(".")[2]):
        if _NAME.search(text):
            return f"the name {text}"
    # Sizes of convolutions' kernels are often equal to others by chance.
    widths = {size for parameter in fused.values() if parameter.ndim == 3 for size in parameter.shape[1:]}
    for key, parameter in module.named_parameters():
        if parameter.ndim == 2 and parameter.shape[0] == num_experts and parameter.shape[1] in widths:
            return f"the router {key} {list(parameter.shape)}"
    return None


def _is_router(key: str, parameter: torch.Tensor, fused: dict[str, nn.Parameter]) -> bool:
    """Return whether a parameter in an experts module is a router's ``[E, H]``, and no bias of the experts."""
    return parameter.ndim == 2 and bool(_ROUTER.search(key)) and "bias" not in key


def counts_experts(config: object) -> bool:
    """Return whether a model's config says that it has several experts."""
    counts = (config_value(config, name) for name in _COUNT_ATTRIBUTES)
    return any(isinstance(count, int) and count > 1 for count in counts)


def _nothing_found(model: nn.Module, patterns: Sequence[str] | None, passed_over: list[PassedOver]) -> str:
    lines = [f"hecate.compile: no experts found in {type(model).__name__}."]
    if patterns is not None:
        lines = [f"hecate.Config(experts=...): {', '.join(patterns)} matches no module with [E, a, b] parameters."]
        names = [name for name, m in model.named_modules() if _matrices(m)]
        lines.append(f"Modules with such parameters: {', '.join(names) or 'none'}.")
    else:
        lines.append(
            "Looked for modules with parameters [E, a, b], one matrix per expert, or [E * a, b], and a sign that "
            "they are experts (num_experts, a name with 'expert' or 'moe', a router beside them)."
        )
        lines += [f"Passed over {p.name or '(the model itself)'}: {p.reason}." for p in passed_over]
        lines.append(
            'If this is an MoE model, name its experts modules: hecate.Config(experts=("*.experts",)). '
            'hecate.Config(policy="replicate") trains any model, with all of it on every rank.'
        )
    return "\n".join(lines)
