"""Models with PEFT's adapters: a checkpoint leaves their frozen base out, and keeps what tells it from another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from hecate.checkpoints.state_dicts import LogicalTensor, sites_of
from hecate.compiled_model import compiled_model_of, is_compiled
from hecate.training.digest import digest, has_digest


def has_adapters(model: nn.Module) -> bool:
    """Return whether PEFT has put adapters into ``model``, which have other names, and files of their own."""
    return any("peft_config" in module.__dict__ for module in model.modules())


def check_no_adapters(model: nn.Module, function: str, way_out: str) -> None:
    """Raise ValueError for a model with PEFT's adapters."""
    if has_adapters(model):
        raise ValueError(f"{function}: the model has adapters of PEFT. {way_out}")


def frozen_base(model: nn.Module) -> set[str]:
    """Return all names in the plain model's state dict of parameters that are no adapter's, and frozen all along."""
    adapters = {
        id(parameter)
        for module in model.modules()
        # Names that PEFT's layers give; an adapter that is not active is frozen, and an adapter all the same.
        for part in (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ()))
        for parameter in _parameters_at(module, part)
    }
    ours = adapters | (compiled_model_of(model, "save").backend.written if is_compiled(model) else set())
    return {
        site.name
        for site in sites_of(model)
        if not site.parameter.requires_grad and id(site.parameter) not in ours and "lora_" not in site.name
    }


def _parameters_at(module: nn.Module, path: str) -> Iterator[nn.Parameter]:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, nn.Module):
        yield from found.parameters()
    elif isinstance(found, nn.Parameter):
        yield found


# --- a base that is left out is compared ---

# Of each parameter the dtype, and a number.
Digests = dict[str, list[Any]]


def base_digests(model: nn.Module, state: Mapping[str, Any], base: Collection[str], *, first: bool) -> Digests:
    """Return the dtype of each of this rank's tensors of the base, and the digest of its part of it.

    What every rank has whole is the ``first`` rank's, and what every group has is that of the first group. Tensors
    that are made of others (quantized ones) are left out.
    """
    if is_compiled(model) and not compiled_model_of(model, "save").mesh.group.has_first:
        return {}
    out: Digests = {}
    for name in sorted(base):
        tensor: Any = state.get(name)
        if isinstance(tensor, LogicalTensor):
            part, line = tensor.part, tensor.whole[1:].numel()
            parts = [(part[p.start : p.start + p.rows], p.offset * line) for p in tensor.pieces]
        else:
            part, parts = tensor, [(tensor, 0)] if first else []
        if parts and has_digest(part):
            found = sum(int(digest(rows, start)) for rows, start in parts)
            out[name] = [str(part.dtype).removeprefix("torch."), found % 2**64]
    return out


def are_digests(found: Any) -> bool:
    """Tell whether ``found``, from a file, is what :func:`base_digests` returns."""
    return isinstance(found, dict) and all(
        isinstance(line, list) and [*map(type, line)] == [str, int] for line in found.values()
    )


def base_differences(
    saved: Sequence[Mapping[str, list[Any]]], here: Sequence[Mapping[str, list[Any]]], *, cast: bool
) -> list[str]:
    """Say how the base of the model differs from that under the adapters that were saved; both are lists by rank."""
    before, now = _added_up(saved), _added_up(here)
    both = [name for name in before if name in now]
    out = [
        f"{name}, under the adapters, was {before[name][0]} when they were saved, and is {now[name][0]}; cast=True "
        "takes it as it is"
        for name in both
        if before[name][0] != now[name][0] and not cast
    ]
    changed = [name for name in both if before[name][0] == now[name][0] and before[name][1] != now[name][1]]
    if changed:
        out.append(
            f"the adapters were saved without their frozen base, and the base here is another one: {len(changed)} of "
            f"its {len(before)} parameters have other values, {changed[0]} the first. Load them into a model of the "
            "same base; same_options=False loads them all the same"
        )
    return out


def _added_up(ranks: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for rank in ranks:
        for name, (dtype, number) in rank.items():
            out[name] = [dtype, (out.get(name, [dtype, 0])[1] + number) % 2**64]
    return out
