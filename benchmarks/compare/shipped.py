"""Systems that are not on Hecate's engine, as they ship."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.compare import shapes


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_bytes(tensor: torch.Tensor) -> int:
    local = local_part(tensor)
    return local.numel() * local.element_size()


def _transformers_ep(model: Any) -> nn.Module:
    """Experts and shards inside nodes, as its documentation advises for several nodes.

    It only starts from a checkpoint, so one is written first.
    """
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp(prefix="hecate-compare-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    layout = DistributedConfig(
        dp_replicate_size=shapes.NODES, fsdp_size=shapes.RANKS_PER_NODE, ep_size=shapes.RANKS_PER_NODE
    )
    loaded: nn.Module = type(model).from_pretrained(folder[0], distributed_config=layout)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return loaded.train()


def _fsdp(model: Any) -> nn.Module:
    """Sharded inside nodes and replicated across them (HSDP), as one does with several nodes."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (shapes.NODES, shapes.RANKS_PER_NODE), mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _ddp(model: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=shapes.BUCKET_MB)


EXTERNAL: dict[str, Callable[[Any], nn.Module]] = {
    "transformers EP": _transformers_ep,
    "FSDP2": _fsdp,
    "DDP": _ddp,
}


def _layer_bytes(model: Any, *, experts: bool) -> int:
    """Parameters of one layer, whole."""
    named = model.model.layers[0].named_parameters()
    return sum(local_bytes(parameter) for name, parameter in named if experts or "experts" not in name)


# What they hold beside their states, from the whole model: a layer that was gathered and its gradients, and buckets,
# which are a copy of all gradients.
BESIDE: dict[str, Callable[[nn.Module], int]] = {
    "transformers EP": lambda model: 2 * _layer_bytes(model, experts=False),
    "FSDP2": lambda model: 2 * _layer_bytes(model, experts=True),
    "DDP": lambda model: sum(map(local_bytes, model.parameters())),
}
