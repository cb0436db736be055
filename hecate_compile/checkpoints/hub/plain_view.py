"""A view of a compiled model with plain names and shapes, as files have them, and the tensors that are in place."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hecate.checkpoints.state_dicts import members_of, whole_shape
from hecate.private import buffers_of, is_persistent, parameters_of
from hecate.wrap.shard import shard_of


@dataclass(frozen=True)
class PlainTensor:
    """A parameter or persistent buffer of the plain model."""

    name: str
    like: torch.Tensor  # Of the whole, on the meta device; the same object for all names of a tied parameter.
    here: torch.Tensor  # What the model holds in its place, perhaps a shard.
    expert: int | None = None  # Number of the expert, if experts of a list are stacked in ``here``.

    @property
    def row(self) -> int | None:
        """The line of ``expert`` in ``here``; None if another rank has it."""
        assert self.expert is not None
        shard: Any = shard_of(self.here)
        experts = list(range(self.here.shape[0])) if shard is None else shard.experts
        return experts.index(self.expert) if self.expert in experts else None


class PlainView:
    """A model whose parameters, in ``tensors``, have plain names and whole shapes; all else is that of ``model``."""

    def __init__(self, model: nn.Module, function: str) -> None:
        self.model = model
        self.tensors = _plain_tensors(model, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def is_pretrained(self) -> bool:
        """True if the model is of transformers, which is not imported for that."""
        module: Any = sys.modules.get("transformers.modeling_utils")
        return module is not None and isinstance(self.model, module.PreTrainedModel)

    def get_parameter(self, target: str) -> torch.Tensor:
        """Return a tensor with the shape and dtype of a parameter, on the meta device."""
        if target not in self.tensors:
            raise AttributeError(f"{type(self.model).__name__} has no {target}")
        return self.tensors[target].like

    get_parameter_or_buffer = get_parameter


def _plain_tensors(model: nn.Module, function: str) -> dict[str, PlainTensor]:
    members = members_of(model)
    likes: dict[tuple[int, int | None], torch.Tensor] = {}
    found: dict[str, PlainTensor] = {}

    def add(name: str, here: torch.Tensor, shape: torch.Size, expert: int | None = None) -> None:
        if isinstance(here, DTensor):
            raise ValueError(f"{function}: {name} is a DTensor; only whole tensors and shards of hecate are known")
        like = likes.setdefault((id(here), expert), torch.empty(shape, dtype=here.dtype, device="meta"))
        found[name] = PlainTensor(name, like, here, expert)

    # In preorder, own tensors first, the order of state_dict.
    for prefix, module in model.named_modules(remove_duplicate=False):
        stacked = []
        for key, here in (*parameters_of(module).items(), *buffers_of(module).items()):
            if here is None or not is_persistent(module, key):
                continue
            names = members.get(id(module), {}).get(key)
            if names is None:
                add(f"{prefix}.{key}".lstrip("."), here, whole_shape(here))
            else:
                stacked += [(expert, f"{prefix}.{name}".lstrip("."), here) for expert, name in enumerate(names)]
        for expert, name, here in sorted(stacked, key=lambda one: one[0]):
            add(name, here, whole_shape(here)[1:], expert)
    return found
