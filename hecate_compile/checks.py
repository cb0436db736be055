"""Checks of ``hecate.compile`` before anything changes: what it refuses, warns about and compares."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hecate.compiled_model import is_compiled
from hecate.config import Config
from hecate.graph.dump_options import dump_options
from hecate.passes import REQUIRED, STAGES, name_of
from hecate.private import OptimizedModule, compiled_call, is_traceable_wrapper_subclass
from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.comm.world import World, local_device
from hecate.wrap.attention_config import AttentionConfig, attention_config
from hecate.wrap.expert_shards import is_member_shard
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.shard import shard_of


def check_usable(model: nn.Module, config: Config) -> None:
    """Refuse a model or options that compile cannot work with, as far as one rank can tell."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"hecate.compile: expected an nn.Module, got {type(model).__name__}")
    if is_compiled(model):
        raise RuntimeError("hecate.compile: this model is compiled already; use it as it is")
    inner = [name for name, module in model.named_modules() if is_compiled(module)]
    if inner:
        raise RuntimeError(f"hecate.compile: {inner[0]} inside this model is compiled already")
    if isinstance(model, OptimizedModule) or compiled_call(model) is not None:
        raise RuntimeError("hecate.compile: the model went through torch.compile before; pass the plain model")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise RuntimeError(
            f"hecate.compile: the model is wrapped in {type(model).__name__}; pass the model inside, "
            "Hecate averages gradients itself"
        )
    _check_no_fsdp(model)
    for name in config.disable_passes:
        if name in REQUIRED:
            raise ValueError(f"hecate.Config: disable_passes names {name!r}; {REQUIRED[name]}")
    names = [name for stage in STAGES for name in map(name_of, stage.entries) if name not in REQUIRED]
    unknown = [name for name in config.disable_passes if name not in names]
    if unknown:
        raise ValueError(f"hecate.Config: disable_passes names {unknown}; the passes are {names}")
    dump_options(config)


def _check_no_fsdp(model: nn.Module) -> None:
    """Refuse a model with hooks of FSDP2, which break graphs."""
    for name, module in model.named_modules():
        # By name: to import fully_shard takes a while, and only who has used it has such classes.
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise RuntimeError(
                f"hecate.compile: {name or type(model).__name__} went through fully_shard (FSDP2). Leave that out; "
                'hecate.Config(dense="shard") splits what is outside of the experts over ranks, rows as fully_shard '
                "does"
            )


def mesh_of_splits(model: nn.Module, experts: Sequence[ExpertsModule]) -> DeviceMesh | None:
    """Return the mesh between whose ranks the model has split parameters (DTensors), as tensor parallelism does.

    Raises RuntimeError for DTensors that Hecate does not take: those of experts, buffers, such on several meshes, on
    the meta device, or neither replicated nor sharded plainly.
    """
    of_experts = {id(parameter) for one in experts for parameter in one.module.parameters()}
    found: DeviceMesh | None = None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, DTensor):
            continue
        what = f"hecate.compile: {name} is a DTensor, {tensor.placements} on {tensor.device_mesh}"
        if not isinstance(tensor, nn.Parameter):
            raise RuntimeError(f"{what}, and a buffer. Buffers must be plain tensors: rank 0's are sent to all ranks")
        if id(tensor) in of_experts:
            raise RuntimeError(
                f"{what}, and one of experts, which Hecate splits itself. Leave experts out of the plan for tensor "
                'parallelism: in a tp_plan of transformers give them and their parameters the style "replicate"'
            )
        if any(type(placement) not in (Replicate, Shard) for placement in tensor.placements):
            raise RuntimeError(
                f"{what}. Expected Replicate() or Shard(dim): no checkpoint can be written of others. In a "
                'tp_plan of transformers give what is packed the style "replicate"'
            )
        if tensor.is_meta:
            raise RuntimeError(
                f"{what}, and has no values yet, which rank 0 alone could make. Give it real tensors first, by "
                "model.to_empty(device=...) and its own initialization on all ranks, or by loading weights"
            )
        if tensor.device_mesh.ndim != 1 or (found is not None and tensor.device_mesh != found):
            before = f"; that of those before is {found}" if found is not None else ""
            raise RuntimeError(
                f"{what}; expected a mesh of one dimension, the same for all parameters{before}. "
                'Along the other dimensions Hecate itself trains, and hecate.Config(dense="shard") splits what is '
                "outside of the experts"
            )
        found = tensor.device_mesh
    return found


def check_one_piece(model: nn.Module, world: World) -> None:
    """Refuse parameters that are several tensors in one, such as quantized ones: ranks cannot split or send them."""
    if world.size == 1:
        return
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor):
            kind = type(parameter.data)
            raise ValueError(
                f"hecate.compile: {name} is a {kind.__module__}.{kind.__name__}, several tensors in one, which ranks "
                "can neither split nor send each other. Train with plain parameters, and quantize the weights "
                "afterwards, in a model that was not compiled: one that reads what hecate.export wrote, or loads "
                "model.state_dict()."
            )


def check_attention(model: nn.Module, config: Config) -> AttentionConfig:
    """Read a model's config for ``Config(attention=...)``, and check that option against it before tracing."""
    known, options = attention_config(model), config.attention
    if options is None or known.heads is None or known.key_heads is None:
        return known
    if known.implementation not in (None, "sdpa"):
        raise UnsupportedAttentionError(
            f"hecate.Config: {type(model).__name__} has attn_implementation={known.implementation!r}, and "
            'S2-Attention takes the place of "sdpa" alone. Load the model with attn_implementation="sdpa"; GPT-OSS, '
            "whose attention has sinks, cannot have it"
        )
    if known.layers is not None:
        if not options.sparse_layers(known.layers):
            raise UnsupportedAttentionError(
                f"hecate.Config: dense_layers={options.dense_layers!r} are all {known.layers} layers of the model, "
                "so none would be sparse. Give fewer, such as S2Attention(dense_layers=())"
            )
        if not isinstance(options.dense_layers, str) and max(options.dense_layers, default=0) >= known.layers:
            raise ValueError(
                f"hecate.Config: dense_layers={options.dense_layers!r} names layer {max(options.dense_layers)}, and "
                f"the model has {known.layers}, from 0"
            )
    options.pattern(known.heads, known.key_heads)
    if known.positions is not None and options.local * options.block >= known.positions:
        warnings.warn(
            f"hecate.Config: {options.local} local blocks of {options.block} tokens are all of the {known.positions} "
            "tokens that the model has positions for: attention stays dense. Give fewer or smaller blocks",
            stacklevel=4,
        )
    return known


def check_no_optimizer(model: nn.Module) -> None:
    """Refuse an optimizer with parameters of the model: it would go on updating what the model no longer has."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for thing in gc.get_objects():
        # By type: isinstance would ask every proxy object in the process about its class.
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        held = [own[id(p)] for group in getattr(thing, "param_groups", ()) for p in group["params"] if id(p) in own]
        if held:
            raise RuntimeError(
                f"hecate.compile: {type(thing).__name__} already holds parameters of this model "
                f"({held[0]} and {len(held) - 1} more), which compile replaces. Build the optimizer after "
                "hecate.compile; if it is left over from before, delete it."
            )


def describe_model(model: nn.Module, config: Config) -> list[str]:
    """Describe model and options in lines that must be equal on all ranks."""
    lines = [f"model {type(model).__name__}"]
    lines += [f"option {name} = {value!r}" for name, value in vars(config).items() if not name.startswith("dump")]
    # Ranks that dump take no graph from a cache, and then no other rank may.
    lines.append(f"graphs are dumped: {dump_options(config) is not None}")
    lines += [
        f"parameter {name} {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}{_placements(p)}"
        for name, p in model.named_parameters()
    ]
    lines += [f"buffer {name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return lines


def _placements(parameter: torch.Tensor) -> str:
    return f" {parameter.placements}" if isinstance(parameter, DTensor) else ""


def check_no_max_norm(model: nn.Module, world: World) -> None:
    """Raise ValueError for an embedding that changes the lines that it reads: ranks read other ones."""
    for name, module in model.named_modules():
        if world.size > 1 and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"hecate.compile: {name} has max_norm={module.max_norm}, with which each rank would change the lines "
                "of its own tokens, so that ranks drift apart. Set it to None, and bound the lines between steps, "
                "alike on all ranks (torch.renorm(weight, 2, 0, max_norm)), or normalize what the embedding returns."
            )


def warn_float16(model: nn.Module, world: World) -> None:
    if any(p.dtype == torch.float16 and p.requires_grad for p in model.parameters()):
        warn_together(
            "hecate.compile: trainable float16 parameters. It runs, but gradients below 6e-8 become zero, and "
            "torch.amp.GradScaler does not take float16 gradients. Use bfloat16, or float32 with "
            "Config(mixed_precision=...).",
            world.rank,
            stacklevel=4,
        )


def warn_single_rows(model: nn.Module, world: World) -> None:
    """Tell where each rank has one row of a parameter: torch would spread it over all rows of a whole one."""
    shards = [shard for p in model.parameters() if (shard := shard_of(p)) is not None and not is_member_shard(shard)]
    single = [shard.name for shard in shards if shard.full_shape[0] == shard.world.size > 1]
    if single:
        warn_together(
            f"hecate: every rank has one row of {', '.join(single[:3])}{', ...' * (len(single) > 3)}. Copy weights "
            "into a model that is not compiled by state_dict(): whole.copy_(parameter), which fails for other "
            "numbers of rows, would fill all rows with this one.",
            world.rank,
            stacklevel=4,
        )


def device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Return the device of the model; for one on the meta device, the one where it should be."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"hecate.compile: the model is spread over {sorted(map(str, devices))}. Move it to one device per rank."
        )
    if devices:
        return devices.pop()
    if mesh is None or mesh.device_type == "cuda":
        return local_device()
    return torch.device(mesh.device_type)
