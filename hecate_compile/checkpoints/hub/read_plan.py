"""Plans, from names and shapes alone, of how transformers' converters make a model's tensors from those of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hecate.checkpoints.coordination import describe
from hecate.checkpoints.hub.layouts import PlainTensor, PlainView
from hecate.checkpoints.safety.files import CorruptError
from hecate.private import adjust_missing_and_unexpected
from hecate.wrap.expert_shards import is_expert_shard
from hecate.wrap.shard import shard_of

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafeFiles:
    """The tensors of a folder; ``likes`` has shape and dtype of each, on the meta device, by name.

    Raise FileNotFoundError if there is no folder or no safetensors file; CorruptError if the index or a file is wrong
    or elsewhere; ValueError if the weights are quantized.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is no folder; huggingface_hub.snapshot_download(...) gives that of a model on the hub"
            )
        self._real = folder.resolve()
        self._check_not_quantized()
        self._open: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self.likes: dict[str, torch.Tensor] = {}
        indexed = self._read_index()
        for file in [_SINGLE] if indexed is None else dict.fromkeys(indexed.values()):
            self._add(file)
        for name, file in (indexed or {}).items():
            if self._where.get(name) != file:
                raise CorruptError(f"{_INDEX} says that {name} is in {file}, and it is not")

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Return a tensor, or its lines ``start`` to ``stop``, on the CPU."""
        file = self._open[self._where[name]]
        tensor: torch.Tensor = file.get_tensor(name) if start is None else file.get_slice(name)[start:stop]
        return tensor

    def _read_index(self) -> dict[str, str] | None:
        """Return the file of each tensor; None if there is a single file."""
        if (self._real / _SINGLE).exists():
            return None
        path = self._real / _INDEX
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} has no {_SINGLE} and no {_INDEX}{self._what_else()}")
        index = self._read_json(_INDEX)
        found = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise CorruptError(f"{_INDEX} cannot be read: it does not say in which file each tensor is")
        return found

    def _read_json(self, name: str) -> Any:
        content = self._confined(name).read_bytes()
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{name} cannot be read: {type(error).__name__}") from error

    def _check_not_quantized(self) -> None:
        if not (self._real / "config.json").exists():
            return
        config = self._read_json("config.json")
        if isinstance(config, dict) and config.get("quantization_config"):
            raise ValueError(
                f"the weights in {self.folder} are quantized. transformers' from_pretrained dequantizes many kinds "
                "(dequantize=True in the quantization config), and what save_pretrained then writes is loaded here"
            )

    def _what_else(self) -> str:
        pickles = sorted(path.name for pattern in _PICKLES for path in self._real.glob(pattern))
        if (self._real / "adapter_config.json").exists():
            return ", but adapters of PEFT"
        if pickles:
            return (
                f", but {pickles[0]}, a pickle, which may run anything when it is read. Where it is trusted, "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) makes safetensors of it"
            )
        return ""

    def _confined(self, name: str) -> Path:
        """Return the path of a plain file of the folder, and refuse a link that leads elsewhere."""
        if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
            raise CorruptError(f"{_INDEX} names a file outside of the folder: {name[:255]!r}")
        path = self._real / name
        if not path.exists():
            raise CorruptError(f"{name} is missing")
        real = path.resolve()
        allowed = [self._real]
        if self._real.parent.name == "snapshots":
            # models--owner--name/snapshots/revision/model.safetensors is a link into models--owner--name/blobs.
            allowed.append(self._real.parent.parent / "blobs")
        if real.parent not in allowed:
            raise CorruptError(f"{name} is a link out of the folder, to {real}; put the file there itself")
        if not real.is_file():
            raise CorruptError(f"{name} is not a plain file")
        return real

    def _add(self, file: str) -> None:
        try:
            opened = safe_open(self._confined(file), framework="pt")
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                if name in self._where:
                    raise CorruptError(f"{name} is in {self._where[name]}, and in {file} again")
                self._where[name] = file
                part = opened.get_slice(name)
                shape = part.get_shape()
                empty = part[:0] if shape else opened.get_tensor(name)
                self.likes[name] = torch.empty(shape, dtype=empty.dtype, device="meta")
        except SafetensorError as error:
            raise CorruptError(f"{file} cannot be read: {error}") from error
        self._open[file] = opened


@dataclass
class Group:
    """Tensors of the files that make tensors of the model, ``targets``, together."""

    target: str  # Name in the model; the first, if there are several.
    converter: Any = None  # Of transformers; None if the tensor is not converted.
    sources: list[tuple[str, str]] = field(default_factory=list)  # Names in the files, and the pattern of each.
    targets: list[PlainTensor] = field(default_factory=list)

    def convert(self, view: PlainView, read: Callable[[str], torch.Tensor], only: Iterable[str]) -> dict[str, Any]:
        """Convert the sources in ``only``, and return tensors by their name in the model."""
        wanted = set(only)
        if self.converter is None:
            return {self.target: read(self.sources[0][0])}
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            if name in wanted:
                # Read by the converter, which frees what it has used.
                converter.add_tensor(self.target, name, pattern, partial(read, name))
        made = converter.convert(self.target, model=view, config=view.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    @property
    def by_expert(self) -> dict[int, list[str]] | None:
        """The sources of each expert, if the converter treats every expert alike; else None."""
        if self.converter is None or len(self.targets) != 1 or not _is_by_line(self.converter.operations):
            return None
        shard = shard_of(self.targets[0].here)
        if not is_expert_shard(shard) or shard.lines > 1:
            return None
        experts: dict[int, list[str]] = {}
        for pattern in dict.fromkeys(pattern for _, pattern in self.sources):
            names = [name for name, of in self.sources if of == pattern]
            if len(names) != shard.full_shape[0]:
                return None
            for expert, name in enumerate(names):
                experts.setdefault(expert, []).append(name)
        return experts


def _is_by_line(operations: Sequence[Any]) -> bool:
    """Return whether each line of the result is made of the same line of each list of sources."""
    from transformers.core_model_loading import Chunk, Concatenate, Interleave, MergeModulelist, Transpose

    first, *rest = operations
    if type(first) is not MergeModulelist or first.dim != 0:
        return False
    for one in rest:
        if type(one) is Transpose:
            if one.check_dims or min(one.dim0, one.dim1) < 1:
                return False
        elif type(one) not in (Chunk, Concatenate, Interleave) or one.dim < 1:
            return False
    return True


@dataclass
class ReadPlan:
    """Groups of tensors in the files and their targets in the model, and what does not fit."""

    view: PlainView
    groups: list[Group]
    missing: list[str]
    unexpected: list[str]
    problems: list[str]
    conversions: list[Any]  # Those of transformers that were used.

    @staticmethod
    def of(view: PlainView, files: SafeFiles) -> ReadPlan:
        plan = ReadPlan(view, [], [], [], [], [])
        if view.is_pretrained:
            plan._group_as_transformers_does(files)
        else:
            plan._group_by_name(files)
        made: set[str] = set()
        for group in plan.groups:
            made |= plan._try(group, files)
        # All names of a tied parameter have what one of them has.
        filled = {id(view.tensors[name].like) for name in made if name in view.tensors}
        plan.missing = [name for name, tensor in view.tensors.items() if id(tensor.like) not in filled]
        plan.unexpected = sorted({*plan.unexpected, *(name for name in made if name not in view.tensors)})
        if view.is_pretrained:
            plan._leave_out_what_transformers_does()
        return plan

    def _group_by_name(self, files: SafeFiles) -> None:
        for name in files.likes:
            if name in self.view.tensors:
                self.groups.append(Group(name, sources=[(name, name)]))
            else:
                self.unexpected.append(name)

    def _group_as_transformers_does(self, files: SafeFiles) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        view: Any = self.view
        mapping = get_model_conversion_mapping(view)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        likes = {name: tensor.like for name, tensor in view.tensors.items()}
        groups: dict[str, Group] = {}
        for name in sorted(files.likes, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, view.base_model_prefix, likes)
            if target not in likes and name in likes:
                target, pattern = name, None
            if target not in likes:
                self.unexpected.append(name)
                continue
            converter = None if pattern is None else by_pattern[pattern]
            group = groups.setdefault(target, Group(target, converter))
            if group.sources and (group.converter is None or converter is None):
                self.problems.append(f"{target} is in the files as {group.sources[0][0]}, and as {name} again")
            else:
                group.sources.append((name, pattern or name))
        self.groups = list(groups.values())
        self.conversions = [one for one in mapping if one.was_used()]

    def _try(self, group: Group, files: SafeFiles) -> set[str]:
        """Convert shapes alone, note what does not fit, and return the names of the results."""
        names = [name for name, _ in group.sources]
        for pattern in dict.fromkeys(pattern for _, pattern in group.sources if "*" in pattern):
            numbered = [name for name, of in group.sources if of == pattern]
            if not _is_numbered(numbered):
                self.problems.append(f"{numbered[0]} and its kin are {len(numbered)}, and not numbered without a gap")
                return {group.target}
        try:
            made = group.convert(self.view, files.likes.__getitem__, names)
        except Exception as error:
            self.problems.append(f"{group.target} cannot be made of {_shown(names)}: {describe(error)}")
            return {group.target}
        for name, one in made.items():
            tensor = self.view.tensors.get(name)
            if tensor is None:
                continue
            group.targets.append(tensor)
            like = tensor.like
            if one.shape != like.shape:
                self.problems.append(
                    f"{name} has the shape {list(one.shape)} in the files and {list(like.shape)} in the model"
                )
            elif not _can_become(one.dtype, like.dtype):
                self.problems.append(f"{name} is {one.dtype} in the files and {like.dtype} in the model")
        return set(made)

    def _leave_out_what_transformers_does(self) -> None:
        from transformers.utils.loading_report import LoadStateDictInfo

        info = LoadStateDictInfo(set(self.missing), set(self.unexpected), set(), [], {}, set())
        adjust_missing_and_unexpected(self.view.model, info)
        self.missing = [name for name in self.missing if name in info.missing_keys]
        self.unexpected = [name for name in self.unexpected if name in info.unexpected_keys]


def _is_numbered(names: Sequence[str]) -> bool:
    """Return whether sorted names differ in one part, which counts from 0: a list with a gap would shift the rest."""
    differ = [parts for parts in zip(*(name.split(".") for name in names), strict=False) if len(set(parts)) > 1]
    if len(names) == 1:
        return True
    return len(differ) == 1 and list(differ[0]) == [str(number) for number in range(len(names))]


def _can_become(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a dtype may become another: the same one, or floats, but for those of one byte (quantized)."""
    floats = source.is_floating_point and target.is_floating_point
    return source == target or (floats and min(source.itemsize, target.itemsize) > 1)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
