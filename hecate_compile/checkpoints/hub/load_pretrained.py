"""``hecate.load_pretrained``: read a folder of ``save_pretrained``, or of ``hecate.export``, into a model's shards.

Each rank reads what it keeps. Tensors that transformers converts (``read_plan``) are made of this rank's experts
alone if every expert is treated alike, and else one at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hecate.checkpoints.adapters import check_no_adapters
from hecate.checkpoints.coordination import CheckpointError, MismatchError, Ranks, ranks_of
from hecate.checkpoints.hub.layouts import PlainTensor, PlainView
from hecate.checkpoints.hub.read_plan import Group, ReadPlan, SafeFiles
from hecate.private import set_weight_conversions
from hecate.runtime.ops.dense import DenseShard
from hecate.wrap.expert_shards import is_expert_shard, is_member_shard
from hecate.wrap.shard import shard_of


class IncompatibleKeys(NamedTuple):
    """Names that ``strict=False`` left out; called as in ``load_state_dict``.

    Attributes:
        missing_keys: of the model, not in the files.
        unexpected_keys: in the files, not of the model.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True) -> IncompatibleKeys:
    """Fill ``model`` from the safetensors files in ``directory``. All ranks call it together.

    Each rank reads the experts and rows that it keeps, and at most one parameter whole at a time. So a model that was
    built on the meta device and compiled needs no rank that has room for all of it. Names may be those in the hub's
    files. As with ``from_pretrained``, tensors take the dtype that the model's have.

    Args:
        model: compiled, or any other with storage.
        directory: a local folder, which all ranks see, such as ``huggingface_hub.snapshot_download`` returns.
        strict: the files must have the model's parameters and buffers, and no others but those that transformers
            leaves out, too. Otherwise the tensors that both have are loaded.

    Returns:
        The names that were left out.

    Raises:
        MismatchError: names, shapes or kinds of numbers differ; nothing was changed.
        CheckpointError: a rank cannot read, ranks see different files, or the weights are quantized; says which.
            Nothing was changed, unless the disk fails after all files were checked.
        RuntimeError: another rank is in something else.
        ValueError: the model is on the meta device, or has adapters of PEFT.
    """
    name = "hecate.load_pretrained"
    check_no_adapters(model, name, "Load the weights before the adapters are added.")
    view = PlainView(model)
    for tensor in view.tensors.values():
        if tensor.here.is_meta:
            raise ValueError(f"{name}: {tensor.name} is on the meta device; compile the model first")
    ranks = ranks_of(model, name)
    folder = Path(directory)
    files = ranks.together(lambda: SafeFiles(folder))
    _check_same(files, ranks)
    plan = ranks.together(lambda: ReadPlan.of(view, files))
    problems = list(plan.problems)
    if strict:
        problems += [f"{name} is not in the files" for name in plan.missing]
        problems += [f"{name} is not in the model" for name in plan.unexpected]
    told = list(dict.fromkeys(line for lines in ranks.gather(problems[:_SHOWN]) for line in lines))
    if told:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise MismatchError(
            f"{name}: {folder} does not fit the model:" + "".join(f"\n  {line}" for line in told[:_SHOWN]) + more
        )
    ranks.together(lambda: _fill(plan, files))
    if view.is_pretrained:
        # The model is then saved again under the names that it was loaded by, as after from_pretrained.
        set_weight_conversions(model, plan.conversions)
    return IncompatibleKeys(plan.missing, plan.unexpected)


_SHOWN = 12


def _check_same(files: SafeFiles, ranks: Ranks) -> None:
    inside = [(name, list(like.shape), str(like.dtype)) for name, like in files.likes.items()]
    digests = ranks.gather(hashlib.sha256(json.dumps(inside).encode()).hexdigest())
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(
                f"hecate.load_pretrained: ranks 0 and {rank} see different files in {files.folder}: all ranks must "
                "see the same folder"
            )


# --- reading ---


@torch.no_grad()
def _fill(plan: ReadPlan, files: SafeFiles) -> None:
    for group in plan.groups:
        if not group.targets:
            continue
        if group.converter is None:
            _read_into(group.targets[0], group.sources[0][0], files)
        elif (experts := group.by_expert) is not None:
            _convert_own_experts(group, experts, plan.view, files)
        else:
            made = group.convert(plan.view, files.read, [name for name, _ in group.sources])
            for tensor in group.targets:
                _copy_part(made.pop(tensor.name), tensor)


def _convert_own_experts(group: Group, experts: dict[int, list[str]], view: PlainView, files: SafeFiles) -> None:
    (tensor,) = group.targets
    shard: Any = shard_of(tensor.here)
    names = [name for expert in shard.experts for name in experts[expert]]
    if names:
        tensor.here.detach().copy_(group.convert(view, files.read, names)[tensor.name])


def _copy_part(whole: torch.Tensor, tensor: PlainTensor) -> None:
    shard = shard_of(tensor.here)
    _copy(tensor.here, whole if shard is None else shard.slice(whole))


def _copy(here: torch.Tensor, values: torch.Tensor) -> None:
    here = here.detach()
    if isinstance(here, DTensor):
        # Every rank has read the whole.
        split = distribute_tensor(values.to(here.device), here.device_mesh, here.placements, src_data_rank=None)
        here, values = here.to_local(), split.to_local()
    here.copy_(values)


def _read_into(tensor: PlainTensor, name: str, files: SafeFiles) -> None:
    """Read this rank's part of a tensor that is the same in the files and in the model."""
    here, shard = tensor.here.detach(), shard_of(tensor.here)
    if shard is None or is_member_shard(shard):
        if shard is None or shard.owned:
            _copy(here, files.read(name))
    elif isinstance(shard, DenseShard):
        rank, counts = shard.world.rank, shard.counts
        start = sum(counts[:rank])
        here[: counts[rank]].copy_(files.read(name, start, start + counts[rank]))
    else:
        assert is_expert_shard(shard)
        lines = shard.lines
        for row, expert in enumerate(shard.experts):
            here[row * lines : (row + 1) * lines].copy_(files.read(name, expert * lines, (expert + 1) * lines))
