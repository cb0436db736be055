"""State of a run besides its tensors: random numbers, owners, the planner's memory, options of the model."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from hecate.compiled_model import CompiledModel, compiled_model_of, is_compiled
from hecate.runtime.placement.owners import Owners
from hecate.runtime.state.layer import Layer
from hecate.wrap.attention_config import attention_config

# Entries of a model's configuration that do not change the function that it computes, or only in training.
_IRRELEVANT = {
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "_attn_implementation",
    "dtype",
    "experts_implementation",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
    "chunk_size_feed_forward",
    "initializer_range",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
}


# Version of what the planner remembers, which begins anew if a checkpoint has another version. Raise it when an
# existing field gets another meaning. A field that is added is read with a default.
_MEMORY = 1


# --- random numbers, of each rank ---


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's generators in this process."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if (module := _with_generators(device)) is not None:
        state[device.type] = module.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to a state of :func:`random_state`."""
    # numpy does not check the position that it reads at.
    if not 0 <= state["numpy"][2] <= len(state["numpy"][1]):
        raise ValueError("a generator of numpy is at no position of its state")
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if (module := _with_generators(device)) is not None and device.type in state:
        module.set_rng_state(state[device.type], device)


def _with_generators(device: torch.device) -> Any:
    """Return the device's module, such as ``torch.cuda``, if each device has a generator of its own; else None."""
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state_all") else None


def new_random_state(step: int, rank: int) -> None:
    """Seed the generators of a rank that did not exist when the run was saved, unlike those of any other rank."""
    seed = int(np.random.SeedSequence([step, rank]).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


# --- owners, and what the planner remembers; equal on all ranks of a group ---


def placement_state(model: nn.Module) -> dict[str, Any] | None:
    """Return the owners and the planner's memory of ``model``; None if it is not compiled."""
    if not is_compiled(model):
        return None
    compiled = compiled_model_of(model, "save")
    between = compiled.forward.between
    between.carrier.settle(whole=True)
    hidden_time = between.hidden_time
    layers = _layers(compiled)
    names = {layer.id: layer.name for layer in layers}
    return {
        "owners": {layer.name: list(layer.owners.ranks) for layer in layers},
        "conditions": _conditions(compiled),
        "layers": {layer.name: layer.placer.state_dict() for layer in layers},
        "placer": compiled.placer.state_dict(),
        "policy": {names[id]: memory for id, memory in compiled.placer.policy.state_dict().items() if id in names},
        "owner_mover": compiled.owner_mover.state_dict(),
        "hidden_time": hidden_time.state_dict() if hidden_time is not None else None,
    }


def speaks_for_group(model: nn.Module) -> bool:
    """Tell whether this rank saves what the planner of its group knows: the first group's is that of the run."""
    if not is_compiled(model):
        return False
    mesh = compiled_model_of(model, "save").mesh
    return not mesh.group.has_first and mesh.group.rank == 0


def forget_last_forward(model: nn.Module) -> None:
    """Drop counts of the last forward that the host has not read yet: they are of the run before the load."""
    if is_compiled(model):
        compiled_model_of(model, "load").forward.between.carrier.forget()


def restore_owners(model: nn.Module, state: dict[str, Any] | None) -> None:
    """Give experts the owners of the checkpoint, if it has owners for as many ranks; a collective."""
    if state is None or not is_compiled(model):
        return
    compiled = compiled_model_of(model, "load")
    if state["conditions"]["ranks"] == compiled.mesh.group.size > 1:
        wanted = [
            (layer, Owners(tuple(state["owners"][layer.name]), compiled.mesh.group.size))
            for layer in _layers(compiled)
            if layer.name in state["owners"]
        ]
        compiled.owner_mover.move(wanted)


def restore_planner(model: nn.Module, state: dict[str, Any] | None) -> None:
    """Let the planner go on with what it knew, if ranks, nodes and devices are the same; else it begins anew."""
    if state is None or not is_compiled(model):
        return
    compiled = compiled_model_of(model, "load")
    layers = {layer.name: layer for layer in _layers(compiled)}
    saved = {"memory": 1, "groups": 1} | state["conditions"]
    if saved != _conditions(compiled) or list(state["layers"]) != list(layers):
        return
    if any(list(layer.owners.ranks) != state["owners"][name] for name, layer in layers.items()):
        return
    compiled.placer.load_state_dict(state["placer"])
    compiled.placer.policy.load_state_dict({layers[name].id: memory for name, memory in state["policy"].items()})
    for name, layer in layers.items():
        layer.placer.load_state_dict(state["layers"][name])
    compiled.owner_mover.load_state_dict(state["owner_mover"])
    hidden_time = compiled.forward.between.hidden_time
    if hidden_time is not None and state["hidden_time"] is not None:
        hidden_time.load_state_dict(state["hidden_time"])


def _layers(compiled: CompiledModel) -> list[Layer]:
    return list(dict.fromkeys(compiled.layers))


def _conditions(compiled: CompiledModel) -> dict[str, Any]:
    """Return the ranks, nodes, device and policy that plans are made for."""
    device = compiled.world.device
    return {
        "memory": _MEMORY,
        "ranks": compiled.mesh.group.size,
        "groups": compiled.mesh.groups,
        "nodes": list(compiled.placer.topology.node_of),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "policy": repr(compiled.placer.policy),
    }


# --- what modules save besides tensors ---


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with a ``get_extra_state`` of their own, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def set_extra_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Give extra states back to the modules that exist in ``model``."""
    for name, module in modules_with_extra_state(model).items():
        if name in states:
            module.set_extra_state(states[name])


# --- what the model computes ---


def function_options(model: nn.Module) -> dict[str, Any]:
    """Return the options that change what the model computes: the same weights with others are another model."""
    attention = compiled_model_of(model, "save").config.attention if is_compiled(model) else None
    known = attention_config(model)
    options = attention.described(known.heads, known.key_heads, known.layers) if attention is not None else None
    found: dict[str, Any] = {"hecate.attention": options}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        found["model.config"] = _relevant(json.loads(json.dumps(config.to_dict(), default=str)))
    return found


def _relevant(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _relevant(value) for key, value in sorted(config.items()) if key not in _IRRELEVANT}


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """Describe the options that are in both and differ, a line each."""
    if isinstance(saved, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(set(saved) & set(now))
            for line in differences(saved[key], now[key], f"{path}.{key}".lstrip("."))
        ]
    return [] if saved == now else [f"{path} was {saved!r} and is {now!r}"]
