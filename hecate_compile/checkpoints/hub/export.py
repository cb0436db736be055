"""``hecate.export``: a folder that transformers loads, written without a whole model on any rank.

Tensors travel to rank 0 alone, a few at a time. The folder is written beside its place and renamed when complete.
"""

from __future__ import annotations

import copy
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from hecate.checkpoints.adapters import check_no_adapters
from hecate.checkpoints.coordination import Ranks, ranks_of
from hecate.checkpoints.hub.layouts import PlainLayout, PlainTensor, PlainView, PretrainedLayout, Tensors
from hecate.checkpoints.publish import discard, sync
from hecate.checkpoints.run_state import modules_with_extra_state
from hecate.private import dtypes_kept_apart
from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import doing
from hecate.runtime.ops.dense import DenseShard
from hecate.wrap.expert_shards import is_expert_shard, is_member_shard
from hecate.wrap.shard import shard_of

_INDEX = "model.safetensors.index.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def export(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the model's weights as ``save_pretrained`` does. All ranks call it together, between two steps.

    ``from_pretrained`` of transformers reads the folder in any process. For a model that is not of transformers the
    folder holds the tensors of the plain model's state dict by their names, tied ones under each of theirs. Rank 0
    writes, and only it must see ``directory``. It holds one file's tensors at a time, and those of one parameter.

    Args:
        model: compiled, or any other.
        directory: a new folder, or an empty one. It appears when all of it is on the disk.
        max_shard_size: most bytes of a file, as a number or as ``"5GB"``; a larger tensor has a file of its own.
        dtype: dtype of parameters in the files; by default their own. Buffers, and parameters that transformers keeps
            in float32, keep theirs.

    Returns:
        ``directory``.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write, or ``directory`` is not empty; it is left unchanged.
        RuntimeError: another rank is in something else.
        ValueError: a wrong argument, or a model with adapters of PEFT, whose own ``save_pretrained`` writes them.
    """
    limit = _bytes_of(max_shard_size)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"hecate.export: dtype={dtype}, expected one of floating point")
    check_no_adapters(model, "hecate.export", "model.save_pretrained(directory), called on all ranks, saves them.")
    for name in modules_with_extra_state(model):
        raise ValueError(
            f"hecate.export: {name or 'the model'} has extra state, for which safetensors files have no place"
        )
    view = PlainView(model)
    ranks = ranks_of(model, "hecate.export")
    plan = ranks.together(lambda: _Plan.of(view, limit, dtype) if ranks.first else None)
    steps = [_Step(*step) for step in ranks.from_first(plan and plan.steps)]
    draft = Path(ranks.on_first(lambda: str(_open_draft(Path(directory)))))
    try:
        _write(view, steps, plan, draft, ranks)
        ranks.together(lambda: _finish(view, plan, draft, dtype, Path(directory)) if plan else None)
    except BaseException:
        if ranks.first:
            discard(draft)
        raise
    return Path(directory)


def _bytes_of(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)\s*", size.upper()) if isinstance(size, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"hecate.export: max_shard_size={size!r}, expected bytes, or a text such as '5GB'")
    return int(float(match[1]) * _UNITS[match[2]])


class _Step(NamedTuple):
    """A group of tensors that is sent to rank 0 at once; if it ``ends`` a file, all ranks wait for that."""

    names: list[str]
    ends: bool


@dataclass(frozen=True)
class _Plan:
    """The files that rank 0 writes, and the steps that fill them."""

    layout: PlainLayout
    steps: list[_Step]
    dtypes: dict[str, torch.dtype]  # In the files, by name in the model.
    files: dict[str, list[str]]  # Names of the tensors in each, in order.
    size: int  # Bytes of all tensors.

    @staticmethod
    def of(view: PlainView, limit: int, dtype: torch.dtype | None) -> _Plan:
        layout = PretrainedLayout(view) if view.is_pretrained else PlainLayout(view)
        if view.is_pretrained and getattr(view, "hf_quantizer", None) is not None:
            raise ValueError("the model is quantized. model.save_pretrained writes it")
        dtypes = _dtypes_of(view, dtype)
        kept = layout.kept({name: tensor.like for name, tensor in view.tensors.items()})
        likes = {name: like.to(dtypes[name]) for name, like in kept.items()}
        groups = layout.groups(likes)
        made = [layout.convert({name: likes[name] for name in names}) for names in groups]
        sizes = {name: one.numel() * one.itemsize for part in made for name, one in part.items()}
        files = _split(sizes, limit)
        last = {names[-1] for names in files.values()}
        steps = [_Step(names, not last.isdisjoint(part)) for names, part in zip(groups, made, strict=True)]
        return _Plan(layout, steps, dtypes, files, sum(sizes.values()))


def _dtypes_of(view: PlainView, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    dtypes = {name: tensor.like.dtype for name, tensor in view.tensors.items()}
    if dtype is None:
        return dtypes
    kept_apart = dtypes_kept_apart(view, dtype) if view.is_pretrained else {}
    for name, tensor in view.tensors.items():
        if isinstance(tensor.here, nn.Parameter) and tensor.like.dtype.is_floating_point:
            special = (kind for glob, kind in kept_apart.items() if re.search(glob.replace("*", ".*"), name))
            dtypes[name] = next(special, dtype)
    return dtypes


def _split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Fill files in order, by the rule and with the names of ``save_pretrained``."""
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            files.append([name])
            continue
        if filled + size > limit:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    if current:
        files.append(current)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)}


# --- the folder ---


def _open_draft(final: Path) -> Path:
    """Make a folder beside ``final``, which it replaces when it is complete and which must be empty or missing."""
    final = final.resolve()
    if final.exists() and not final.is_dir():
        raise FileExistsError(f"{final} is a file")
    if final.exists() and any(final.iterdir()):
        raise FileExistsError(f"{final} is not empty. Give another folder, or remove what is in it")
    draft = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
    draft.mkdir(parents=True)
    return draft


# --- to rank 0, and to the disk ---


def _write(view: PlainView, steps: Sequence[_Step], plan: _Plan | None, draft: Path, ranks: Ranks) -> None:
    """Bring group after group to rank 0, and write each file as soon as it is complete."""
    writer = None if plan is None else _Writer(plan, draft)
    for step in steps:
        with doing("hecate.export"):
            whole = {name: _to_first(view.tensors[name], ranks.first) for name in step.names}
        if writer is not None:
            writer.take({name: tensor for name, tensor in whole.items() if tensor is not None})
        del whole
        if step.ends:
            ranks.together(lambda: writer.write() if writer is not None else None)


def _to_first(tensor: PlainTensor, first: bool) -> torch.Tensor | None:
    """Return the whole tensor on rank 0, on the CPU; None elsewhere. A collective."""
    here, shard = tensor.here.detach(), shard_of(tensor.here)
    if isinstance(here, DTensor):
        here = here.full_tensor()
    if shard is None or shard.world.group is None:
        return here.cpu() if first else None
    world = shard.world
    if not world.has_first:
        # Another group has the same.
        return None
    if isinstance(shard, DenseShard):
        counts = shard.counts
        here = here[: counts[world.rank]]
    elif is_member_shard(shard):
        counts = [len(tensor.like) if rank == shard.owner else 0 for rank in range(world.size)]
    else:
        assert is_expert_shard(shard)
        counts = shard.layer.owners.counts
        here = shard.by_expert(here)
    send = [here.shape[0]] + [0] * (world.size - 1)
    joined = collectives.all_to_all(here, send, counts if world.rank == 0 else [0] * world.size, world)
    if world.rank != 0:
        return None
    if is_expert_shard(shard) and not shard.layer.owners.in_order:
        ordered = torch.empty_like(joined)
        ordered[torch.from_numpy(shard.layer.owners.by_rank).to(joined.device)] = joined
        joined = ordered
    return (shard.as_written(joined) if is_expert_shard(shard) else joined).cpu()


class _Writer:
    """Makes the files' tensors from the model's on rank 0, and keeps them until their file is complete."""

    def __init__(self, plan: _Plan, draft: Path) -> None:
        self._plan, self._draft = plan, draft
        self._pending: Tensors = {}
        self._left = dict(plan.files)
        self._problem: Exception | None = None

    def take(self, whole: Tensors) -> None:
        if self._problem is not None:
            return
        try:
            cast = {name: tensor.to(self._plan.dtypes[name]) for name, tensor in whole.items()}
            whole.clear()
            self._pending |= self._plan.layout.convert(cast)
        except Exception as problem:
            # Kept until all ranks wait for the file: until then the others are busy with the next tensor.
            self._problem = problem

    def write(self) -> None:
        """Write the files that are complete; raise an error that was kept."""
        if self._problem is not None:
            raise self._problem
        for file, names in list(self._left.items()):
            if all(name in self._pending for name in names):
                tensors = {name: self._pending.pop(name).contiguous() for name in names}
                save_file(tensors, self._draft / file, metadata={"format": "pt"})
                del self._left[file]


def _finish(view: PlainView, plan: _Plan, draft: Path, dtype: torch.dtype | None, final: Path) -> None:
    """Write all but the weights, and give the folder its name, on rank 0."""
    if len(plan.files) > 1:
        whole = {id(t.like): t.like.numel() for t in view.tensors.values() if isinstance(t.here, nn.Parameter)}
        index = {
            "metadata": {"total_parameters": sum(whole.values()), "total_size": plan.size},
            "weight_map": {name: file for file, names in plan.files.items() for name in names},
        }
        (draft / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if view.is_pretrained:
        _write_config(view, draft, dtype)
    for path in (*draft.iterdir(), draft):
        sync(path)
    # This fails if something has been put into an empty folder since.
    draft.rename(final.resolve())
    sync(final.resolve().parent)


def _write_config(view: PlainView, folder: Path, dtype: torch.dtype | None) -> None:
    from transformers.dynamic_module_utils import custom_object_save

    # A copy: what a compiled forward reads must not change.
    config = copy.deepcopy(view.config)
    config.dtype = str(dtype or view.dtype).removeprefix("torch.")
    config.architectures = [type(view.model).__name__]
    if view.is_remote_code():
        custom_object_save(view.model, folder, config=config)
    config.save_pretrained(folder)
    if view.can_generate():
        view.generation_config.save_pretrained(folder)
